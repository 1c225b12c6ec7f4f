"""Ray's daemons may come up too late on a busy machine: they are started again, not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray

from engines import cluster
from model_specs.errors import EngineError

LATE = "The current node timed out during startup. This could happen because ..."


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let Ray's start fail with these messages, one a start, before it succeeds."""

    def fail_with(*messages: str) -> list[int]:
        left, made = list(messages), [0]

        def init(**_: object) -> None:
            made[0] += 1
            if left:
                raise Exception(left.pop(0))

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_worker_niceness"):
            monkeypatch.delenv(name, raising=False)
        return made

    return fail_with


def enter() -> None:
    with cluster.Cluster("test", num_cpus=1, object_store_mib=100):
        pass


def test_late_daemons_are_started_again(starts: Callable[..., list[int]]) -> None:
    made = starts(LATE)
    enter()
    assert made == [2]


def test_daemons_that_are_always_late_are_an_error(starts: Callable[..., list[int]]) -> None:
    made = starts(*[LATE] * 5)
    with pytest.raises(Exception, match="timed out during startup"):
        enter()
    assert made == [cluster.START_ATTEMPTS]


def test_any_other_failure_is_raised_at_once(starts: Callable[..., list[int]]) -> None:
    made = starts("no space left on device")
    with pytest.raises(Exception, match="no space left"):
        enter()
    assert made == [1]


@pytest.mark.parametrize(
    "lost",
    [
        ray.exceptions.OutOfMemoryError("no memory"),
        ray.exceptions.RuntimeEnvSetupError("no environment"),
        ray.exceptions.ActorUnschedulableError("no room"),
        ray.exceptions.LocalRayletDiedError("no raylet"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_takes_an_engine_away_is_an_engine_error(
    lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: object) -> None:
        raise lost

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(EngineError, match="drawing: the engine process was lost"):
        cluster._value(object(), "drawing")
