"""Rewards: pure functions of a completion's text, its label and the declared options.

No clock, generator, model or torch takes part, so a reward is as repeatable as the text. A reward
is rounded to float32 before anything sees it, because that is the value that is digested.

Usage::

    rewards = score_samples(samples, {prompt.prompt_id: prompt.label}, spec.reward)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from engines.contracts import Sample
from engines.rewards import digits, gsm8k
from model_specs.errors import EngineError, SpecError
from model_specs.run_spec import RewardSpec

RewardFunction = Callable[..., float]
"""`score(completion_text, label, spec, *, finish_reason) -> float` in [0, 1]."""

REWARDS: dict[str, RewardFunction] = {"gsm8k": gsm8k.score, "digits": digits.score}
"""Reward name of the spec -> function; nothing registers itself."""


def score_samples(
    samples: Sequence[Sample], labels: Mapping[str, str], spec: RewardSpec
) -> tuple[float, ...]:
    """Return one reward a sample, in the order of `samples`, each exactly a float32 in [0, 1].

    Args:
        samples: Completions.
        labels: Prompt id -> label.
        spec: Name and options of the reward.

    Raises:
        SpecError: For an unknown reward.
        EngineError: For a sample whose prompt has no label, or a reward outside of [0, 1].
    """
    if spec.name not in REWARDS:
        raise SpecError(
            f"unknown reward {spec.name!r}; known rewards: {', '.join(sorted(REWARDS))}"
        )
    rewards = []
    for sample in samples:
        if sample.prompt_id not in labels:
            raise EngineError(
                f"sample {sample.request_id}: prompt {sample.prompt_id!r} has no label"
            )
        reward = REWARDS[spec.name](
            sample.text, labels[sample.prompt_id], spec, finish_reason=sample.finish_reason
        )
        if not 0.0 <= reward <= 1.0:  # also refuses NaN
            raise EngineError(
                f"reward {spec.name!r} of sample {sample.request_id} is {reward!r}, not in [0, 1]"
            )
        rewards.append(struct.unpack("<f", struct.pack("<f", reward))[0])
    return tuple(rewards)
