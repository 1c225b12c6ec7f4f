"""Trainer and rollout on one GPU: pushes over CUDA IPC, and both engines asleep in turn.

    python3 -m tools.gpu.one_gpu [--device cuda] [--parts pushes,shallow,deep] [--out OUT.json]
        [--scratch FOLDER] [--shape RECIPE]

With `--device cpu` the same parts run over shared memory and a tiny model.

- `pushes`: a run that never sleeps, then 20 pushes: sent = received, time, and memory after each.
- `shallow`: the same run with `execution.sleep=1`: the same chain, memory awake and asleep.
- `deep`: with `execution.sleep=2`.
"""

from __future__ import annotations

import time
from typing import Any

from engines.cluster import gather
from engines.rollout.group import RolloutGroup
from engines.train.group import TrainerGroup
from tools.gpu.legs import run_leg
from tools.gpu.parts import Parts, Results, Run, main, verdict

STEPS = 3
PUSHES = 20
FLAT_MIB = 2.0
"""What a later push may hold more than the third: a page of the driver's, no bucket."""


def pushes(run: Run) -> Results:
    """A run that never sleeps, and then many pushes."""

    def many(trainer: TrainerGroup, rollout: RolloutGroup) -> dict[str, Any]:
        seconds, memory = [], []
        for turn in range(PUSHES):
            began = time.perf_counter()
            sent, received = trainer.push(rollout, version=STEPS)
            seconds.append(round(time.perf_counter() - began, 4))
            assert sent == received, f"push {turn}: sent is not received"
            asked = [h.run("engines.memory:process_memory") for h in rollout.handles]
            memory.append(round(gather(asked, what="memory")[0], 1))
        growth = max(memory[3:]) - memory[2]
        return {
            "seconds": seconds,
            "mib": memory,
            "growth_mib": growth,
            "flat": growth <= FLAT_MIB,
            "tensors": len(sent),
        }

    spec = run.world.spec(transport="cuda_ipc")
    leg = run_leg(run.world, spec, name="never asleep", steps=STEPS, after=many)
    run.keep(leg)
    yield "never asleep", leg.summary()
    yield f"{PUSHES} pushes over CUDA IPC", leg.environment.pop("after")
    yield "environment", leg.environment


def shallow(run: Run) -> Results:
    """Weights of the engine go to the host."""
    yield from _slept(run, level=1)


def deep(run: Run) -> Results:
    """Weights of the engine are discarded."""
    yield from _slept(run, level=2)


def _slept(run: Run, *, level: int) -> Results:
    spec = run.world.spec(transport="cuda_ipc", sleep=level)
    leg = run_leg(run.world, spec, name=f"sleep {level}", steps=STEPS)
    yield f"asleep in turn, level {level}", leg.summary()
    yield "as never asleep", verdict(run.reference(), leg)


PARTS: Parts = {"pushes": (pushes, 90), "shallow": (shallow, 75), "deep": (deep, 75)}


if __name__ == "__main__":
    main(PARTS, description=__doc__ or "", module="tools.gpu.one_gpu")
