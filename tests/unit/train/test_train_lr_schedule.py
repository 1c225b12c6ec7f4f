"""The learning rate: corners of each kind, and windows that are empty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.train.lr_schedule import learning_rate
from model_specs.run_spec import OptimizerSpec, ScheduleSpec

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
