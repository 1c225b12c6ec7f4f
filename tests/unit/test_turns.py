"""Whose turn it is: who is awake for which work, and what a deep sleep has to bring back."""

from __future__ import annotations

from typing import Any

import pytest

from engines import turns
from engines.turns import Turns


class Process:
    """Notes what it is told and refuses what a real engine would."""

    def __init__(self, name: str, log: list[str], parts: tuple[str, ...]) -> None:
        self.name, self.log, self.parts = name, log, parts
        self.awake = set(parts)

    def call(self, method: str, **options: Any) -> dict[str, float]:
        if method == "sleep":
            assert self.awake == set(self.parts), f"{self.name} sleeps in part"
            self.awake.clear()
        else:
            chosen = set(options.get("parts", self.parts))
            assert not chosen & self.awake, f"{self.name}: {chosen} are awake"
            self.awake |= chosen
        self.log.append(f"{self.name} {method} {' '.join(map(str, options.values()))}".strip())
        return {"before_mib": 10.0, "after_mib": 1.0}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(turns, "gather", lambda answers, what: list(answers))
    return []


def made(log: list[str], level: int) -> tuple[Turns, Process, Process]:
    trainer = Process("trainer", log, ("trainer",))
    engine = Process("engine", log, ("weights", "kv_cache"))
    taken = Turns(
        [trainer],  # type: ignore[list-item]
        [engine],  # type: ignore[list-item]
        level=level,
        push_again=lambda: (log.append("push again"), taken.weights_arrived())[1],
    )
    return taken, trainer, engine


STEP = ("push", "rollout", "trainer", "push", "trainer", "rollout")
"""Initial push, draw, update, push, a checkpoint, draw."""


@pytest.mark.parametrize("level", [1, 2])
def test_who_works_is_awake_and_who_does_not_need_to_be_sleeps(level: int, log: list[str]) -> None:
    taken, trainer, engine = made(log, level)
    for work in STEP:
        taken.need(work)
        if work == "push":
            assert trainer.awake
            assert engine.awake == {"weights"}
            taken.weights_arrived()
        elif work == "rollout":
            assert not trainer.awake
            assert engine.awake == {"weights", "kv_cache"}
        else:
            assert trainer.awake
            assert "kv_cache" not in engine.awake
    assert "push again" not in log
    assert taken.memory["perf/memory/rollout_asleep_mib"] == 1.0
    assert taken.memory["perf/memory/trainer_awake_mib"] == 10.0


def test_draws_without_a_push_after_a_deep_sleep_bring_the_weights_again(log: list[str]) -> None:
    taken, _, engine = made(log, 2)
    taken.need("trainer")
    taken.need("rollout")
    assert log.count("push again") == 1
    assert engine.awake == {"weights", "kv_cache"}
    taken.need("rollout")
    assert log.count("push again") == 1


def test_after_a_shallow_sleep_nothing_is_pushed(log: list[str]) -> None:
    taken, _, _ = made(log, 1)
    taken.need("trainer")
    taken.need("rollout")
    assert "push again" not in log


def test_at_level_zero_nobody_is_told_anything(log: list[str]) -> None:
    taken, _, _ = made(log, 0)
    for work in STEP:
        taken.need(work)
    assert not log
    assert not taken.memory
