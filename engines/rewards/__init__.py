"""Rewards: functions of a completion's text, its label and the declared options.

A reward is rounded to float32 before anything sees it, because that is the value that is digested.
Every reward is computed twice, the second time in reverse order, and a difference ends the run as
Diverged at probe `rewards`: a reward that draws, reads the clock or remembers is no function.
`digits` and `gsm8k` run in this process; `math` and own code run in processes of their own
(`engines.rewards.isolated`), where a hang ends the run at `reward.timeout_s` and no state outlives
a step.

An own reward is named `my_pkg.mod:score` or `FILE.py:score` and has this form::

    def score(completion, label, *, spec, finish_reason, metadata):
        '''Return a number in [spec.low, spec.high].'''

`spec` is the run's `RewardSpec` (own options: `json.loads(spec.options)`), `finish_reason` is
`stop` or `length`, and `metadata` is the row's value under `data.metadata_key`, or None.

Usage::

    labels = {prompt.prompt_id: prompt.label for prompt in prompts}
    rewards = score_samples(samples, labels, spec.reward, metadata=metadata_of(prompts))
"""

from __future__ import annotations

import json
import math
import numbers
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engines.contracts import Prompt, Sample
from engines.delays import pause
from engines.rewards import digits, gsm8k, math_reward
from engines.rewards.isolated import RewardItem, score_twice
from model_specs.errors import DivergedError, EngineError, SpecError
from model_specs.run_spec import RewardSpec

RewardFunction = Callable[..., float]
"""`score(completion, label, *, spec, finish_reason, metadata) -> float` in [low, high]."""

REWARDS: dict[str, RewardFunction] = {
    "digits": digits.score,
    "gsm8k": gsm8k.score,
    "math": math_reward.score,
}
"""Reward name of the spec -> function; nothing registers itself."""

ISOLATED_REWARDS = frozenset({"math"})
"""Shipped rewards that call a library of which we cannot say how long it takes."""


def metadata_of(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return prompt id -> canonical JSON of its metadata, for the prompts that have any."""
    return {p.prompt_id: p.metadata for p in prompts if p.metadata is not None}


def score_samples(
    samples: Sequence[Sample],
    labels: Mapping[str, str],
    spec: RewardSpec,
    *,
    metadata: Mapping[str, str] | None = None,
) -> tuple[float, ...]:
    """Return one reward a sample, in the order of `samples`, each exactly a float32.

    Args:
        samples: Completions.
        labels: Prompt id -> label.
        spec: Name and options of the reward.
        metadata: Prompt id -> metadata as JSON text; see `metadata_of`.

    Raises:
        SpecError: For an unknown reward, or own code that is not there or has changed.
        EngineError: For a sample whose prompt has no label, or a reward that raises, hangs, or is
            not a number in [spec.low, spec.high]; names the sample.
        DivergedError: Computed again, a reward is another one; names the first such sample.
    """
    if not spec.is_own_code and spec.name not in REWARDS:
        raise SpecError(
            f"unknown reward {spec.name!r}; known rewards: {', '.join(sorted(REWARDS))}"
        )
    items = [_item(sample, labels, metadata or {}) for sample in samples]
    if spec.is_own_code or spec.name in ISOLATED_REWARDS:
        first, second = score_twice(items, spec)
    else:
        first, second = _score_here(items, spec)
    values = tuple(_checked(value, item, spec) for value, item in zip(first, items, strict=True))
    again = tuple(_checked(value, item, spec) for value, item in zip(second, items, strict=True))
    _require_equal(values, again, items, spec)
    return values


def _item(sample: Sample, labels: Mapping[str, str], metadata: Mapping[str, str]) -> RewardItem:
    if sample.prompt_id not in labels:
        raise EngineError(f"sample {sample.request_id}: prompt {sample.prompt_id!r} has no label")
    return RewardItem(
        request_id=sample.request_id,
        text=sample.text,
        label=labels[sample.prompt_id],
        finish_reason=sample.finish_reason,
        metadata=metadata.get(sample.prompt_id),
    )


def _score_here(items: Sequence[RewardItem], spec: RewardSpec) -> tuple[list[float], list[float]]:
    def score(item: RewardItem) -> float:
        pause()
        return REWARDS[spec.name](
            item.text,
            item.label,
            spec=spec,
            finish_reason=item.finish_reason,
            metadata=None if item.metadata is None else json.loads(item.metadata),
        )

    first = [score(item) for item in items]
    second = [score(item) for item in reversed(items)]
    return first, second[::-1]


def _checked(value: Any, item: RewardItem, spec: RewardSpec) -> float:
    """Return the reward as a float32 value."""
    _require_number(value, item, spec)
    if not spec.low <= value <= spec.high:  # also refuses NaN
        kind = "" if math.isfinite(value) else "; rewards are finite numbers"
        raise EngineError(
            f"reward {spec.name!r} of sample {item.request_id} is {value!r}, not in "
            f"[{spec.low}, {spec.high}]{kind}; set reward.low and reward.high to its range, or "
            "correct it"
        )
    return as_float32(value)


def as_float32(value: float) -> float:
    """Return the float32 nearest to a value: what a reward is, and what it is compared with."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _require_number(value: object, item: RewardItem, spec: RewardSpec) -> None:
    if not isinstance(value, numbers.Real):
        raise EngineError(
            f"reward {spec.name!r} of sample {item.request_id} returned a "
            f"{type(value).__name__} ({value!r}), not a number"
        )


def _require_equal(
    values: Sequence[float],
    again: Sequence[float],
    items: Sequence[RewardItem],
    spec: RewardSpec,
) -> None:
    differing = [
        (item.request_id, value, other)
        for item, value, other in zip(items, values, again, strict=True)
        if struct.pack("<f", value) != struct.pack("<f", other)
    ]
    if differing:
        name, value, other = differing[0]
        raise DivergedError(
            f"probe rewards: {len(differing)} of {len(items)} rewards {spec.name!r} came out "
            f"differently when computed again; first sample {name}: {value!r}, then {other!r}; a "
            "reward may depend on completion, label and metadata alone (no random draw, clock, "
            "network, order of a set, or memory of earlier calls)",
            probe="rewards",
            name=name,
        )
