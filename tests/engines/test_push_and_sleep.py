"""The same bits over every transport and at every depth of sleep, on one real vLLM.

One engine is kept; trainers come and go, each from the initial weights, so that a leg differs from
the first by its transport and its sleep alone. On CPU the transports run over shared memory and
gloo, and the engine's KV cache and weights really lose their memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.cluster import gather
from engines.rollout.group import RolloutGroup
from model_specs.errors import EngineError
from tools.gpu.legs import (
    Leg,
    Processes,
    World,
    create_engines,
    first_difference,
    processes,
    run_steps,
    start_trainer,
)

pytestmark = pytest.mark.slow

STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(shape="tiny_cpu", device="cpu", folder=tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def started(world: World) -> Iterator[Processes]:
    spec = world.spec(trainer_ranks=2)
    with processes(world, spec, name="push and sleep", with_engines=True) as made:
        gather(create_engines(world, spec, made.engines), what="start of the engine")
        yield made


def leg(world: World, started: Processes, *, ranks: int = 1, **execution: object) -> Leg:
    spec = world.spec(trainer_ranks=ranks, **execution)
    trainer = start_trainer(world, spec, started.trainers[:ranks])
    rollout = RolloutGroup(started.engines, spec)
    try:
        return run_steps(world, spec, trainer, rollout, steps=STEPS)
    finally:
        gather([rollout.call_first("weight_version")], what="wake")
        left = [h.run("tools.gpu.legs:leave_groups") for h in started.trainers[:ranks]]
        gather(left, what="end of the trainer")


@pytest.fixture(scope="module")
def reference(world: World, started: Processes) -> Leg:
    found = leg(world, started)
    assert found.gate["max_abs_diff"] == 0.0
    assert found.gate["tokens"] > 100
    assert all(norm > 1e-3 for norm in found.norms)
    assert not found.memory
    return found


@pytest.mark.parametrize(
    ("ranks", "transport", "sleep"),
    [(1, "cuda_ipc", 1), (2, "nccl", 2), (2, "cuda_ipc", 0), (1, "host", 2)],
)
def test_a_leg_is_the_same_bits_over_any_transport_and_asleep_or_not(
    ranks: int, transport: str, sleep: int, world: World, started: Processes, reference: Leg
) -> None:
    found = leg(world, started, ranks=ranks, transport=transport, sleep=sleep)
    assert first_difference(reference.digests, found.digests) is None
    assert found.chain == reference.chain
    assert found.gate == reference.gate
    if sleep:
        assert set(found.memory) == {
            f"perf/memory/{who}_{when}_mib"
            for who in ("trainer", "rollout")
            for when in ("awake", "asleep")
        }
        freed = found.memory["perf/memory/rollout_awake_mib"]
        assert found.memory["perf/memory/rollout_asleep_mib"] < freed


def test_what_a_deep_sleep_discarded_is_not_drawn_from(world: World, started: Processes) -> None:
    """The control: without a push the engine refuses, and with its weights gone it could not."""
    (engine,) = started.engines
    gather([engine.call("sleep", level=2)], what="sleep")
    with pytest.raises(EngineError, match="generate was called on an engine that sleeps"):
        gather([engine.call("generate", [])], what="generate")
    gather([engine.call("wake", parts=("weights",))], what="wake")
    with pytest.raises(EngineError, match="kv_cache sleep; nothing can be drawn"):
        gather([engine.call("generate", [])], what="generate")
    gather([engine.call("wake", parts=("kv_cache",))], what="wake")
    with pytest.raises(EngineError, match="no weights have been pushed"):
        gather([engine.call("generate", [])], what="generate")


def test_another_step_is_another_chain(reference: Leg) -> None:
    """The control: the legs above are not equal because everything is."""
    one, two = reference.digests["1.0"], reference.digests["2.0"]
    assert all(one[probe] != two[probe] for probe in ("tokens", "grads", "weights", "received"))
