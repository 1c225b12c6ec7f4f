"""The learning rate, a pure function of the number of samples consumed.

Invariant: nothing is carried from update to update, so a resumed run and a longer run read the same
rates; the count is in samples, so it does not depend on how samples are cut into updates.

    rate = learning_rate(samples_consumed, optimizer=spec.optimizer, schedule=spec.schedule)
"""

from __future__ import annotations

import math

from model_specs.run_spec import OptimizerSpec, ScheduleSpec


def learning_rate(
    samples_consumed: int, *, optimizer: OptimizerSpec, schedule: ScheduleSpec
) -> float:
    """Return the learning rate (float64) of the update that ends at `samples_consumed` samples.

    The count includes the update's own samples, so that a warm-up has no update at rate zero and
    the update that ends at `horizon_samples` has exactly `min_lr`.

    - up to `warmup_samples`: `lr * samples_consumed / warmup_samples`
    - then `constant`: `lr`
    - `linear`: `min_lr + (lr - min_lr) * (1 - t)`, `cosine`: `... * (1 + cos(pi t)) / 2`, where t
      goes from 0 at `warmup_samples` to 1 at `horizon_samples` and stays there.

    A horizon that does not lie after the warm-up leaves no window to decay in: t is 1 at once.

    Raises:
        ValueError: `samples_consumed` is negative.
    """
    if samples_consumed < 0:
        raise ValueError(f"samples_consumed must not be negative, but is {samples_consumed}")
    if samples_consumed < schedule.warmup_samples:
        return optimizer.lr * samples_consumed / schedule.warmup_samples
    if schedule.kind == "constant":
        return optimizer.lr
    window = schedule.horizon_samples - schedule.warmup_samples
    elapsed = samples_consumed - schedule.warmup_samples
    if elapsed >= window:
        return schedule.min_lr
    fraction = elapsed / window
    remaining = (
        1 - fraction if schedule.kind == "linear" else (1 + math.cos(math.pi * fraction)) / 2
    )
    return schedule.min_lr + (optimizer.lr - schedule.min_lr) * remaining
