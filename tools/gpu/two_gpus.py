"""Trainer and rollout on several GPUs: the same bits as on one? Parts, each with a time limit.

    python3 -m tools.gpu.two_gpus [--device cuda] [--parts reference,separate,...] [--out OUT.json]
        [--scratch FOLDER] [--shape RECIPE] [--ranks 2]

With `--device cpu` the same parts run on gloo and a tiny model.

- `reference`: one GPU, colocated, weights over CUDA IPC; all others are compared with it.
- `separate`: trainer on one GPU, vLLM on the other, weights over NCCL, engine started with dummy
  weights; twice.
- `engines`: two ranks, two engines.
- `ranks`: FSDP2 and Megatron on one rank and on up to `--ranks` over the reference's rollouts,
  checkpoints resumed on the other number of ranks, the stock reduction beside it.
- `widest`: those trainers on `--ranks` ranks alone.
- `launches`: NCCL's variables from inside, Ring and Tree in 20 launches each.
- `float64`: one float32 step on `--ranks` ranks against float64.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines.cluster import gather
from tools.gpu.legs import Leg, first_difference, processes, replay, run_leg, start_trainer
from tools.gpu.parts import Parts, Results, Run, main, tried, verdict

STEPS = 3
SAVED = 2
"""Step after which a checkpoint is written and resumed on another number of ranks."""
LAUNCHES = 20
AT_ONCE = 5
"""Launches that run side by side, each with a communicator of its own on the same GPUs."""
NOT_REPLAYED = ("prompts", "tokens", "rollout_logprobs", "rewards", "advantages", "received")
"""Probes of the rollout, which a trainer alone does not have or was given."""


def reference(run: Run) -> Results:
    """One GPU, colocated."""
    leg = run_leg(run.world, run.world.spec(transport="cuda_ipc"), name="reference", steps=STEPS)
    run.keep(leg)
    yield "one GPU, colocated, CUDA IPC", leg.summary()
    yield "environment", leg.environment


def separate(run: Run) -> Results:
    """Trainer and engine on a GPU each, twice."""
    spec = run.world.spec(placement="separate", transport="nccl")
    legs = [run_leg(run.world, spec, name=f"separate {name}", steps=STEPS) for name in ("a", "b")]
    for name, leg in zip("ab", legs, strict=True):
        yield f"trainer and engine apart, leg {name}", leg.summary()
    yield "environment", legs[0].environment
    yield "twin", verdict(legs[0], legs[1])
    yield "as colocated on one GPU", verdict(run.reference(), legs[0])


def engines(run: Run) -> Results:
    """Two ranks and two engines on two GPUs."""
    spec = run.world.spec(trainer_ranks=2, rollout_engines=2, transport="cuda_ipc")
    leg = run_leg(run.world, spec, name="two and two", steps=STEPS)
    yield "two ranks, two engines, colocated", leg.summary()
    yield "as one rank and one engine", verdict(run.reference(), leg)


def ranks(run: Run) -> Results:
    """Trainers alone on the reference's rollouts, on 1, 2, ... ranks; resumed; stock beside."""
    sizes = tuple(1 << level for level in range(run.ranks.bit_length()))
    yield from _trainers_alone(run, sizes, is_whole=True)


def widest(run: Run) -> Results:
    """The same on the most ranks alone, where time is short."""
    yield from _trainers_alone(run, (run.ranks,), is_whole=False)


def _trainers_alone(run: Run, sizes: tuple[int, ...], *, is_whole: bool) -> Results:
    drawn = run.reference().drawn
    saved = run.scratch / f"checkpoints-{time.time_ns()}"
    states: dict[str, str] = {}
    with processes(
        run.world, run.world.spec(trainer_ranks=run.ranks), name="ranks", with_engines=False
    ) as started:

        def job(trainer: str, size: int, *, origin: str = "", reduction: str = "tree") -> Leg:
            parts: dict[str, Any] = {"trainer": trainer}
            if reduction == "stock":
                slots = run.world.base.reduction.slots
                parts["reduction"] = {"kind": "stock", "slots": slots, "world_size": size}
            spec = run.world.spec(parts=parts, trainer_ranks=size)
            name = f"{trainer}-{size}-{reduction}"
            try:
                group = start_trainer(run.world, spec, started.trainers[:size])
                if origin:
                    group.ensure_at(saved / origin, states[origin])
                todo = [step for step in drawn if not origin or step.step > SAVED]

                def save(step: int) -> Path | None:
                    return saved / name if step == SAVED and not origin else None

                leg = replay(group, spec, todo, save=save)
                if leg.states:
                    (states[name],) = leg.states.values()
                return leg
            finally:
                left = [h.run("tools.gpu.legs:leave_groups") for h in started.trainers[:size]]
                gather(left, what="end of a trainer", timeout_s=30)

        def told(leg: Leg) -> dict[str, Any]:
            return {
                "as the reference": first_difference(
                    run.reference().digests, leg.digests, ignoring=NOT_REPLAYED
                )
                or "identical",
                "norms": leg.norms,
                "update_s": [round(s, 3) for s in leg.seconds["update_s"]],
            }

        for trainer in ("fsdp2", "megatron"):
            for size in sizes:
                yield from tried(
                    f"{trainer}, {size} ranks", lambda t=trainer, n=size: told(job(t, n))
                )
            for size, other in ((run.ranks, 1), (1, run.ranks)) if is_whole else ():
                yield from tried(
                    f"{trainer}, written on {size}, resumed on {other}",
                    lambda t=trainer, n=size, m=other: told(job(t, m, origin=f"{t}-{n}-tree")),
                )
        for turn in (1, 2) if is_whole else ():
            yield from tried(
                f"fsdp2, {run.ranks} ranks, stock reduction, run {turn}",
                lambda: told(job("fsdp2", run.ranks, reduction="stock")),
            )


def launches(run: Run) -> Results:
    """Ring and Tree, in fresh processes each."""
    from engines.rollout.group import engine_env
    from engines.train.group import trainer_env

    spec = run.world.spec()
    number = LAUNCHES if run.device == "cuda" else 2
    for role, env in (("trainer", trainer_env(spec)), ("rollout", engine_env(spec))):
        found = _launch(run, {**env, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV,TUNING"})
        yield f"{role}'s variables, from inside", found
    for algorithm in ("Ring", "Tree"):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            turns = [pool.submit(_launch, run, {"NCCL_ALGO": algorithm}) for _ in range(number)]
            found = [turn.result() for turn in turns]
        outcomes = {json.dumps(one["digests"], sort_keys=True) for one in found}
        yield (
            f"{algorithm}, {number} launches",
            {
                "different outcomes": len(outcomes),
                "digests": found[0]["digests"],
                "milliseconds of the last launch": found[-1]["milliseconds"],
            },
        )


def _launch(run: Run, env: dict[str, str]) -> dict[str, Any]:
    """Start one rank a GPU; return what rank 0 found, with NCCL's own words if they were asked."""
    folder = Path(tempfile.mkdtemp(dir=run.scratch, prefix="launch-"))
    log = folder / "nccl-%p.log"
    program = [sys.executable, "-m", "tools.gpu.launches"]
    ends = [f"file://{folder}/rendezvous", str(folder / "out.json"), "--device", run.device]
    started = [
        subprocess.Popen(
            [*program, str(rank), str(run.ranks), *ends],
            env={**os.environ, **env, "NCCL_DEBUG_FILE": str(log)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(run.ranks)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"a launch ended with {process.returncode}: {errors[-800:]}")
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    words = "".join(path.read_text(errors="replace") for path in folder.glob("nccl-*.log"))
    told = [line for line in words.splitlines() if "NCCL_ALGO" in line or "Algo" in line]
    found["nccl's lines"] = sorted(set(told))[:12]
    found["nccl says"] = sorted(set(re.findall(r"NCCL_\w+ set by environment to [\w:,.^]+", words)))
    chosen = re.findall(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)", words)
    found["nccl chose"] = sorted({" ".join(row) for row in chosen})
    return found


def float64(run: Run) -> Results:
    """One float32 step on two ranks of a shape against float64 on one GPU."""
    from tools.gpu.float64_ranks import compare

    yield (
        f"float32 on {run.ranks} ranks against float64",
        compare(run.scratch, device=run.device, ranks=run.ranks),
    )


PARTS: Parts = {
    "reference": (reference, 120),
    "separate": (separate, 130),
    "engines": (engines, 90),
    "ranks": (ranks, 150),
    "widest": (widest, 100),
    "launches": (launches, 120),
    "float64": (float64, 100),
}
"""Name -> (function, limit in seconds)."""


if __name__ == "__main__":
    main(PARTS, description=__doc__ or "", module="tools.gpu.two_gpus")
