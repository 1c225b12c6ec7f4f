"""Learning rate and weight decay, pure functions of the number of samples consumed.

Invariant: nothing is carried from update to update, so a resumed run and a longer run read the same
rates; the count is in samples, so it does not depend on how samples are cut into updates.

    rate = learning_rate(samples_consumed, optimizer=spec.optimizer, schedule=spec.schedule)
    decay = weight_decay(samples_consumed, spec.optimizer)
"""

from __future__ import annotations

import math

from model_specs.run_spec import OptimizerSpec, ScheduleSpec
from model_specs.schedules import WeightDecaySchedule, WsdSchedule


def learning_rate(
    samples_consumed: int, *, optimizer: OptimizerSpec, schedule: ScheduleSpec | WsdSchedule
) -> float:
    """Return the learning rate (float64) of the update that ends at `samples_consumed` samples.

    The count includes the update's own samples, so that a warm-up has no update at rate zero and
    the update that ends at `horizon_samples` has exactly `min_lr`.

    - up to `warmup_samples`: `lr * samples_consumed / warmup_samples`
    - then `constant`: `lr`
    - `linear`: `min_lr + (lr - min_lr) * (1 - t)`, `cosine`: `... * (1 + cos(pi t)) / 2`, where t
      goes from 0 at `warmup_samples` to 1 at `horizon_samples` and stays there.

    - `wsd`: `lr` until `decay_samples` before the horizon, then as its `decay`, t from there.

    A horizon that does not lie after the warm-up leaves no window to decay in: t is 1 at once.

    Raises:
        ValueError: `samples_consumed` is negative.
    """
    _check_count(samples_consumed)
    if samples_consumed < schedule.warmup_samples:
        return optimizer.lr * samples_consumed / schedule.warmup_samples
    if schedule.kind == "constant":
        return optimizer.lr
    begin = schedule.warmup_samples
    shape: str = schedule.kind
    if isinstance(schedule, WsdSchedule):
        begin = max(begin, schedule.horizon_samples - schedule.decay_samples)
        shape = schedule.decay
        if samples_consumed < begin:
            return optimizer.lr
    remaining = _remaining(samples_consumed, begin, schedule.horizon_samples, shape)
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * remaining


def weight_decay(samples_consumed: int, optimizer: OptimizerSpec) -> float:
    """Return the weight decay (float64) of the update that ends at `samples_consumed` samples.

    A schedule goes from `start` at 0 samples to `end` at its horizon, linearly or along half a
    cosine, and stays there; a horizon of 0 leaves no window, so it is `end` at once.

    Raises:
        ValueError: `samples_consumed` is negative.
    """
    _check_count(samples_consumed)
    schedule = optimizer.weight_decay
    if not isinstance(schedule, WeightDecaySchedule):
        return schedule
    remaining = _remaining(samples_consumed, 0, schedule.horizon_samples, schedule.kind)
    return schedule.end + (schedule.start - schedule.end) * remaining


def _check_count(samples_consumed: int) -> None:
    if samples_consumed < 0:
        raise ValueError(f"samples_consumed must not be negative, but is {samples_consumed}")


def _remaining(samples: int, begin: int, end: int, shape: str) -> float:
    """Return what is left to fall at `samples`: 1 at `begin`, 0 from `end` on."""
    if samples >= end:
        return 0.0
    fraction = (samples - begin) / (end - begin)
    return 1 - fraction if shape == "linear" else (1 + math.cos(math.pi * fraction)) / 2
