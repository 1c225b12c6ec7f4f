"""The learning rate: corners of each kind, and windows that are empty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.train.lr_schedule import learning_rate, weight_decay
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import OptimizerSpec, ScheduleSpec
from model_specs.schedules import WsdSchedule

OPTIMIZER = OptimizerSpec(lr=1e-3)


def rate(samples: int, **schedule: object) -> float:
    return learning_rate(
        samples, optimizer=OPTIMIZER, schedule=ScheduleSpec.model_validate(schedule)
    )


def test_constant_without_warmup_is_the_rate_itself() -> None:
    assert {rate(samples) for samples in (0, 1, 10**9)} == {1e-3}


def test_warmup_rises_linearly_and_ends_at_the_full_rate() -> None:
    assert rate(0, warmup_samples=10) == 0.0
    assert rate(5, warmup_samples=10) == pytest.approx(5e-4, rel=1e-15)
    assert rate(10, warmup_samples=10) == 1e-3


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_the_full_rate_and_stays_at_the_minimum(kind: str) -> None:
    schedule = {"kind": kind, "warmup_samples": 10, "horizon_samples": 110, "min_lr": 1e-5}
    assert rate(10, **schedule) == 1e-3
    assert rate(60, **schedule) == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-12)
    assert rate(110, **schedule) == rate(10**6, **schedule) == 1e-5


def test_cosine_and_linear_differ_at_a_quarter() -> None:
    linear = rate(25, kind="linear", horizon_samples=100)
    cosine = rate(25, kind="cosine", horizon_samples=100)
    assert linear == pytest.approx(7.5e-4, rel=1e-12)
    assert cosine == pytest.approx(1e-3 * (1 + math.cos(math.pi / 4)) / 2, rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("horizon", [0, 5, 10])
def test_empty_decay_window_never_divides_by_zero(kind: str, horizon: int) -> None:
    schedule = {"kind": kind, "warmup_samples": 10, "horizon_samples": horizon, "min_lr": 1e-6}
    assert rate(10, **schedule) == 1e-6
    assert rate(9, **schedule) == pytest.approx(9e-4, rel=1e-12)


@given(
    st.integers(0, 10**7),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 10**5),
    st.integers(0, 10**6),
)
def test_rate_is_always_within_zero_and_the_full_rate(
    samples: int, kind: str, warmup: int, horizon: int
) -> None:
    value = rate(samples, kind=kind, warmup_samples=warmup, horizon_samples=horizon)
    assert 0.0 <= value <= 1e-3


def test_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        rate(-1)


def wsd(samples: int, **schedule: object) -> float:
    return learning_rate(
        samples, optimizer=OPTIMIZER, schedule=WsdSchedule.model_validate(schedule)
    )


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_wsd_is_stable_until_its_window_and_ends_at_the_minimum(decay: str) -> None:
    schedule = {
        "warmup_samples": 10,
        "horizon_samples": 1000,
        "decay_samples": 100,
        "decay": decay,
        "min_lr": 1e-5,
    }
    assert wsd(5, **schedule) == pytest.approx(5e-4, rel=1e-15)
    assert wsd(10, **schedule) == wsd(899, **schedule) == wsd(900, **schedule) == 1e-3
    assert wsd(950, **schedule) == pytest.approx((1e-3 + 1e-5) / 2, rel=1e-12)
    assert wsd(1000, **schedule) == wsd(10**6, **schedule) == 1e-5
    # Without a stable part it is the plain schedule.
    whole = {**schedule, "decay_samples": 10**6}
    plain = {n: v for n, v in schedule.items() if n not in ("decay_samples", "decay")}
    for samples in (3, 10, 77, 500, 999, 1000):
        assert wsd(samples, **whole) == rate(samples, kind=decay, **plain)


@pytest.mark.parametrize(("horizon", "window"), [(0, 0), (5, 3), (10, 0), (10, 50), (100, 0)])
def test_an_empty_window_of_wsd_never_divides_by_zero(horizon: int, window: int) -> None:
    schedule = {"warmup_samples": 10, "horizon_samples": horizon, "decay_samples": window}
    assert wsd(max(10, horizon), **schedule) == 0.0
    if horizon > 11:
        assert wsd(horizon - 1, **schedule) == 1e-3


def decay(samples: int, **schedule: object) -> float:
    optimizer = OptimizerSpec.model_validate({"lr": 1e-3, "weight_decay": schedule})
    return weight_decay(samples, optimizer)


def test_weight_decay_moves_between_its_values_by_samples() -> None:
    assert weight_decay(10**6, OPTIMIZER) == OPTIMIZER.weight_decay == 0.1
    for kind in ("linear", "cosine"):
        schedule = {"kind": kind, "start": 0.0, "end": 0.2, "horizon_samples": 100}
        assert decay(0, **schedule) == 0.0
        assert decay(50, **schedule) == pytest.approx(0.1, rel=1e-12)
        assert decay(100, **schedule) == decay(10**6, **schedule) == 0.2
    linear, cosine = (
        decay(25, kind=kind, start=0.0, end=0.2, horizon_samples=100)
        for kind in ("linear", "cosine")
    )
    assert linear == pytest.approx(0.05, rel=1e-12)
    assert cosine < linear


def test_an_empty_window_of_weight_decay_is_its_end_at_once() -> None:
    assert decay(0, start=0.5, end=0.1, horizon_samples=0) == 0.1
    with pytest.raises(ValueError, match="-1"):
        weight_decay(-1, OPTIMIZER)


def test_schedules_are_set_from_the_command_line_and_kinds_replace_each_other() -> None:
    plain = load_recipe("tiny_cpu")
    changed = apply_overrides(
        plain, ("schedule.kind=wsd", "schedule.horizon_samples=64", "schedule.decay_samples=16")
    )
    assert changed.schedule == WsdSchedule(horizon_samples=64, decay_samples=16)
    back = apply_overrides(changed, ("schedule.kind=constant", "schedule.horizon_samples=0"))
    assert trajectory_fingerprint(back) == trajectory_fingerprint(plain)
    moving = apply_overrides(
        plain,
        (
            "optimizer.weight_decay.start=0.0",
            "optimizer.weight_decay.end=0.1",
            "optimizer.weight_decay.horizon_samples=64",
        ),
    )
    assert weight_decay(32, moving.optimizer) == pytest.approx(0.05)
    with pytest.raises(SpecError, match=r"schedule\.decay_samples"):
        apply_overrides(plain, ("schedule.kind=wsd", "schedule.decay_samples=-1"))
