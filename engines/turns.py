"""Whose turn it is where trainer and engines share memory: one sleeps while the other works.

`TrainerGroup` and `RolloutGroup` say what they need before each call; who is not needed is sent to
sleep first, then who is needed is woken. During a push the trainer and the engines' weights are
awake, the KV cache is not. Invariant: sleeping moves bytes and changes none, so a run that sleeps
is bit for bit the run that never does. With level 0 nobody ever sleeps. Imports no torch.

    turns = Turns(trainers, engines, level=1, push_again=push_again)
    turns.need("trainer")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from engines.cluster import EngineHandle, gather

Part = Literal["trainer", "weights", "kv_cache"]
NEEDS: Mapping[str, frozenset[Part]] = {
    "trainer": frozenset({"trainer"}),
    "push": frozenset({"trainer", "weights"}),
    "rollout": frozenset({"weights", "kv_cache"}),
}
"""What each kind of work needs awake."""


class Turns:
    """Sends to sleep and wakes; everyone is awake at first."""

    def __init__(
        self,
        trainers: Sequence[EngineHandle],
        engines: Sequence[EngineHandle],
        *,
        level: int,
        push_again: Callable[[], None],
    ) -> None:
        """Take turns at this level of `execution.sleep`.

        `push_again` is called with the engines' weights awake and empty, where draws are asked for
        and no push has come since the weights were discarded.
        """
        self._trainers, self._engines = tuple(trainers), tuple(engines)
        self._level = level
        self._push_again = push_again
        self._awake: set[Part] = {"trainer", "weights", "kv_cache"}
        self._is_empty = False
        self.memory: dict[str, float] = {}
        """Metric name -> MiB in use before and after the last sleep, of rank 0 and engine 0."""

    def need(self, work: str) -> None:
        """Have awake what `work`, a key of `NEEDS`, needs, and put to sleep what it does not.

        The engines fall asleep as a whole, so weights that came without the KV cache stay.
        """
        if not self._level:
            return
        if work == "rollout" and self._is_empty:
            self.need("push")
            self._push_again()
        wanted = NEEDS[work]
        if "trainer" in self._awake - wanted:
            self._sleep("trainer", self._trainers)
            self._awake.remove("trainer")
        if "kv_cache" in self._awake - wanted:
            self._sleep("rollout", self._engines, level=self._level)
            self._awake -= {"weights", "kv_cache"}
            self._is_empty = self._level == 2
        if "trainer" in wanted - self._awake:
            self._all(self._trainers, "wake")
        parts = [part for part in ("weights", "kv_cache") if part in wanted - self._awake]
        if parts:
            self._all(self._engines, "wake", parts=parts)
        self._awake |= wanted

    def weights_arrived(self) -> None:
        """Say that a push has filled the engines' weights."""
        self._is_empty = False

    def _sleep(self, name: str, handles: Sequence[EngineHandle], **options: Any) -> None:
        found = self._all(handles, "sleep", **options)[0]
        self.memory[f"perf/memory/{name}_awake_mib"] = found["before_mib"]
        self.memory[f"perf/memory/{name}_asleep_mib"] = found["after_mib"]

    @staticmethod
    def _all(handles: Sequence[EngineHandle], method: str, **options: Any) -> list[Any]:
        return gather([handle.call(method, **options) for handle in handles], what=method)
