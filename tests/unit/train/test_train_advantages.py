"""Advantages: the formula by hand, groups without variance, and the two controls."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.train.advantages import group_advantages, round_to_float32
from model_specs.errors import EngineError
from model_specs.run_spec import LossSpec

REWARDS = [[0.0, 1.0, 0.25, 0.75], [0.5, 0.5, 0.5, 0.5], [1.0, 0.0, 0.0, 0.0]]


def is_float32(value: float) -> bool:
    return struct.unpack("<f", struct.pack("<f", value))[0] == value


def test_values_follow_the_formula_computed_by_hand() -> None:
    got = group_advantages(REWARDS, LossSpec(), seed=0)
    std = math.sqrt((0.25 + 0.25 + 0.0625 + 0.0625) / 3)
    expected = [round_to_float32(d / (std + 1e-6)) for d in (-0.5, 0.5, -0.25, 0.25)]
    assert list(got.values[:4]) == expected
    assert got.values[8] == round_to_float32(0.75 / (0.5 + 1e-6))


def test_group_without_variance_gets_exact_positive_zeros_and_is_not_counted() -> None:
    got = group_advantages(REWARDS, LossSpec(), seed=0)
    assert [math.copysign(1.0, value) for value in got.values[4:8]] == [1.0] * 4
    assert got.values[4:8] == (0.0, 0.0, 0.0, 0.0)
    assert (got.num_groups, got.groups_with_variance) == (3, 2)


def test_without_normalize_std_the_centred_reward_is_returned() -> None:
    got = group_advantages(REWARDS, LossSpec(normalize_std=False), seed=0)
    assert got.values[:4] == (-0.5, 0.5, -0.25, 0.25)


def test_sign_flipped_negates_every_value_and_keeps_zeros_positive() -> None:
    plain = group_advantages(REWARDS, LossSpec(), seed=0)
    flipped = group_advantages(REWARDS, LossSpec(advantage_transform="sign_flipped"), seed=0)
    assert flipped.values == tuple(-value for value in plain.values)
    assert math.copysign(1.0, flipped.values[4]) == 1.0


def test_shuffled_permutes_across_groups_by_the_seed_alone() -> None:
    shuffled = LossSpec(advantage_transform="shuffled")
    plain = group_advantages(REWARDS, LossSpec(), seed=7)
    first = group_advantages(REWARDS, shuffled, seed=7)
    assert sorted(first.values) == sorted(plain.values)
    assert first.values != plain.values
    assert first == group_advantages(REWARDS, shuffled, seed=7)
    assert first.values != group_advantages(REWARDS, shuffled, seed=8).values
    assert any(value != 0 for value in first.values[4:8])


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12), st.randoms())
def test_order_within_a_group_never_changes_a_samples_value(
    group: list[float], shuffle: random.Random
) -> None:
    order = list(range(len(group)))
    shuffle.shuffle(order)
    plain = group_advantages([group], LossSpec(), seed=0).values
    permuted = group_advantages([[group[i] for i in order]], LossSpec(), seed=0).values
    assert permuted == tuple(plain[i] for i in order)
    assert all(is_float32(value) for value in plain)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_refused_by_place(bad: float) -> None:
    with pytest.raises(EngineError, match="sample 1 of group 1"):
        group_advantages([[0.0, 1.0], [0.0, bad]], LossSpec(), seed=0)


def test_empty_group_is_refused() -> None:
    with pytest.raises(EngineError, match="group 1"):
        group_advantages([[0.0, 1.0], []], LossSpec(), seed=0)
