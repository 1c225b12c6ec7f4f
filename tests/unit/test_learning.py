"""The judge of the learning runs: made-up curves that must pass, and one fault at a time."""

from __future__ import annotations

import pytest

from tools.learning import judge

STEPS = 30
EXACT = {4: 0.80, 5: 0.81, 6: 0.79}
STOCK = {4: 0.81, 5: 0.79, 6: 0.80}
SHUFFLED = {4: 0.0, 5: 0.5, 6: 0.0, 7: 0.0, 8: 0.2, 9: 0.1}


def curves(kind: str, ends: dict[int, float]) -> dict[tuple[str, int], list[float]]:
    """Runs that earn 0.1 for ten steps and their end for twenty."""
    return {(kind, seed): [0.1] * 10 + [end] * 20 for seed, end in ends.items()}


def judged(
    exact: dict[int, float] = EXACT,
    shuffled: dict[int, float] = SHUFFLED,
    stock: dict[int, float] = STOCK,
) -> dict[str, object]:
    """The verdict on runs with these ends."""
    runs = curves("exact", exact) | curves("shuffled", shuffled) | curves("stock", stock)
    return judge(runs, STEPS)


def test_runs_that_learn_beside_a_random_walk_pass() -> None:
    found = judged()
    assert found["learns"] is True
    assert found["shuffled_does_not_rise"] is True
    assert found["stock_within_seed_noise"] is True
    # The first criterion is stricter than chance allows, and is reported as it was written.
    assert found["shuffled_all_below_threshold"] is False


@pytest.mark.parametrize("ending", [0.29, 0.45])
def test_an_exact_run_below_the_threshold_or_below_a_shuffled_one_has_not_learned(
    ending: float,
) -> None:
    assert judged(exact={**EXACT, 5: ending})["learns"] is False


def test_shuffled_runs_that_rise_in_most_seeds_are_a_rise() -> None:
    found = judged(shuffled={4: 0.4, 5: 0.5, 6: 0.1, 7: 0.3, 8: 0.6, 9: 0.5})
    assert found["shuffled_does_not_rise"] is False
    assert found["learns"] is True


def test_stock_apart_by_more_than_two_seeds_is_outside_the_noise() -> None:
    assert judged(stock=dict.fromkeys((4, 5, 6), 0.77))["stock_within_seed_noise"] is False


def test_a_short_run_is_named_and_passes_nothing() -> None:
    runs = curves("exact", EXACT) | curves("shuffled", SHUFFLED) | curves("stock", STOCK)
    runs["stock", 5] = runs["stock", 5][:-1]
    found = judge(runs, STEPS)
    assert found["short_or_missing"] == ["stock-5"]
    passed = ("learns", "shuffled_does_not_rise", "stock_within_seed_noise")
    assert [found[name] for name in passed] == [False, False, False]
