"""Group-relative advantages of GRPO, computed in the driver.

Invariant: every sum is exactly rounded (`math.fsum`), so neither the order nor the grouping of the
machine's work can change a bit, and every value returned is a float32 carried as a Python float.

    advantages = group_advantages(rewards, loss, seed=derive_seed(root, "advantages", step))
    advantages.values            # prompt by prompt, sample by sample
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from engines.seeds import derive_seed
from model_specs.errors import EngineError
from model_specs.run_spec import LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of all samples of one step."""

    values: tuple[float, ...]
    """float32 values, prompt by prompt and sample by sample."""
    num_groups: int
    groups_with_variance: int
    """Groups whose rewards are not all equal: only these teach anything."""


def round_to_float32(value: float) -> float:
    """Return the float32 nearest to a float64 (ties to even), as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def group_advantages(
    rewards: Sequence[Sequence[float]], loss: LossSpec, *, seed: int
) -> Advantages:
    """Return (reward - mean) / (std + eps) within each prompt's group of samples.

    The formula is GRPO's (arXiv 2402.03300, section 4.1.2), with the unbiased standard deviation;
    without `normalize_std` the division is left out (arXiv 2503.20783). A group whose rewards are
    all equal gets exact zeros. The two transforms are controls: `shuffled` permutes the advantages
    over all samples of the step by a permutation made from `seed`, `sign_flipped` negates them.

    Args:
        rewards: Per prompt the finite rewards of its samples.
        loss: Gives `advantage_eps`, `normalize_std` and `advantage_transform`.
        seed: Decides the permutation of `shuffled`; unused otherwise.

    Raises:
        EngineError: A group is empty or a reward is not finite.
    """
    values: list[float] = []
    with_variance = 0
    for index, group in enumerate(rewards):
        _check(group, index)
        if min(group) != max(group):
            with_variance += 1
            values += _normalised(group, loss)
        else:
            values += [0.0] * len(group)
    if loss.advantage_transform == "shuffled":
        values = _permuted(values, seed)
    elif loss.advantage_transform == "sign_flipped":
        values = [0.0 - value for value in values]  # 0.0 - 0.0 keeps a zero positive
    return Advantages(
        values=tuple(values), num_groups=len(rewards), groups_with_variance=with_variance
    )


def _check(group: Sequence[float], index: int) -> None:
    if not group:
        raise EngineError(f"group {index} of the rewards has no sample; every prompt needs some")
    for sample, reward in enumerate(group):
        if not math.isfinite(reward):
            raise EngineError(
                f"reward {reward} of sample {sample} of group {index} is not finite; "
                "a reward function must return a finite number"
            )


def _normalised(group: Sequence[float], loss: LossSpec) -> list[float]:
    mean = math.fsum(group) / len(group)
    centred = [reward - mean for reward in group]
    if not loss.normalize_std:
        return [round_to_float32(value) for value in centred]
    variance = math.fsum(value * value for value in centred) / (len(group) - 1)
    scale = math.sqrt(variance) + loss.advantage_eps
    return [round_to_float32(value / scale) for value in centred]


def _permuted(values: Sequence[float], seed: int) -> list[float]:
    """Fisher-Yates, each draw a hash of the seed and its position."""
    permuted = list(values)
    for last in range(len(permuted) - 1, 0, -1):
        other = derive_seed(seed, "advantage-permutation", last) % (last + 1)
        permuted[last], permuted[other] = permuted[other], permuted[last]
    return permuted
