"""Trainer and rollout on several GPUs: the same bits as on one? Parts, each with a time limit.

    python3 -m tools.gpu.two_gpus [--device cuda] [--parts reference,separate,...] [--out OUT.json]
        [--scratch FOLDER] [--shape RECIPE] [--ranks N]

Ranks are as many as there are GPUs, or `--ranks`; with two a sum has one order only. With
`--device cpu` the same parts run on gloo and a tiny model, on two.

- `reference`: one GPU, colocated, weights over CUDA IPC; all others are compared with it.
- `separate`: trainer on one GPU, vLLM on the other, weights over NCCL, engine started with dummy
  weights; twice.
- `engines`: two ranks, two engines.
- `ranks`: FSDP2 and Megatron on one rank and on up to `--ranks` over the reference's rollouts,
  checkpoints resumed on the other number of ranks, the stock reduction of each beside it, twice.
- `widest`: those trainers on `--ranks` ranks alone.
- `launches`: NCCL's variables from inside, Ring and Tree in 20 launches each; what NCCL says it ran
  has to be what was asked for.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines.cluster import gather
from engines.placement import engine_name
from engines.rollout.group import engine_env
from engines.train.group import trainer_env
from model_specs.run_spec import RunSpec
from tools.gpu.legs import (
    Leg,
    Processes,
    first_difference,
    processes,
    replay,
    run_leg,
    start_trainer,
)
from tools.gpu.parts import Parts, Results, Run, main, tried, verdict

STEPS = 3
SAVED = 2
"""Step after which a checkpoint is written and resumed on another number of ranks."""
LAUNCHES = 20
AT_ONCE = 5
"""Launches that run side by side, each with a communicator of its own on the same GPUs."""
NOT_REPLAYED = ("prompts", "tokens", "rollout_logprobs", "rewards", "advantages", "received")
"""Probes of the rollout, which a trainer alone does not have or was given."""
SAYS_WHAT_RAN = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV,TUNING"}
"""NCCL then writes which of its variables it read, and the algorithm of each size."""


def reference(run: Run) -> Results:
    """One GPU, colocated."""
    leg = run_leg(run.world, run.world.spec(transport="cuda_ipc"), name="reference", steps=STEPS)
    run.keep(leg)
    yield "one GPU, colocated, CUDA IPC", leg.summary()
    yield "environment", leg.environment
    yield "variables of both roles", variables_read_back(run.world.spec(), leg)


def separate(run: Run) -> Results:
    """Trainer and engine on a GPU each, twice."""
    spec = run.world.spec(placement="separate", transport="nccl")
    legs = [run_leg(run.world, spec, name=f"separate {name}", steps=STEPS) for name in ("a", "b")]
    for name, leg in zip("ab", legs, strict=True):
        yield f"trainer and engine apart, leg {name}", leg.summary()
    yield "environment", legs[0].environment
    yield "variables of both roles", variables_read_back(spec, *legs)
    yield "twin", verdict(legs[0], legs[1])
    yield "as colocated on one GPU", verdict(run.reference(), legs[0])


def variables_read_back(spec: RunSpec, *legs: Leg) -> dict[str, dict[str, str]]:
    """Return role -> NCCL's variables, as the trainer's and the engine's own processes have them.

    Raises:
        AssertionError: A process has another value than its role is started with.
    """
    found: dict[str, dict[str, str]] = {}
    for leg in legs:
        environment = leg.environment
        for role, asked, facts in (
            ("trainer", trainer_env(spec), environment["trainer"]),
            ("rollout", engine_env(spec), environment["rollout"][engine_name(0)]),
        ):
            real = {name: v for name, v in facts["variables"].items() if name in asked}
            wanted = {name: asked[name] for name in real}
            assert real == wanted, f"{role}: started with {wanted}, its process has {real}"
            assert real, f"{role}: no variable was read back"
            found[role] = {name: v for name, v in real.items() if name.startswith("NCCL_")}
    return found


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
    spec = run.world.spec(trainer_ranks=run.ranks)
    with processes(run.world, spec, name="ranks", with_engines=False) as started:
        alone = _Alone(run, started)
        for trainer in ("fsdp2", "megatron"):
            for size in sizes:
                yield from tried(
                    f"{trainer}, {size} ranks", lambda t=trainer, n=size: alone.replayed(t, n)
                )
            for size, other in ((run.ranks, 1), (1, run.ranks)) if is_whole else ():
                yield from tried(
                    f"{trainer}, written on {size}, resumed on {other}",
                    lambda t=trainer, n=size, m=other: alone.replayed(t, m, origin=f"{t}-{n}-tree"),
                )
            if is_whole:
                yield from _stock_twice(run, alone, trainer)


def _stock_twice(run: Run, alone: _Alone, trainer: str) -> Results:
    """The stock reduction in two runs: whether it repeats is reported and not required."""
    name = f"{trainer}, {run.ranks} ranks, stock reduction"
    legs: list[Leg] = []

    def one_run() -> dict[str, Any]:
        legs.append(alone.leg(trainer, run.ranks, reduction="stock"))
        return alone.told(legs[-1])

    for turn in (1, 2):
        yield from tried(f"{name}, run {turn}", one_run)
    if len(legs) == 2:
        one, two = (leg.digests for leg in legs)
        found = first_difference(one, two, ignoring=NOT_REPLAYED)
        yield f"{name}, run 1 against run 2", {"first difference": found or "none"}


class _Alone:
    """Trainers without engines, each over the reference's rollouts in the same processes."""

    def __init__(self, run: Run, started: Processes) -> None:
        self._run, self._handles = run, started.trainers
        self._reference = run.reference()
        self._saved = run.scratch / f"checkpoints-{time.time_ns()}"
        self._states: dict[str, str] = {}

    def replayed(self, trainer: str, size: int, *, origin: str = "") -> dict[str, Any]:
        return self.told(self.leg(trainer, size, origin=origin))

    def leg(self, trainer: str, size: int, *, origin: str = "", reduction: str = "tree") -> Leg:
        """Replay on so many ranks, from the start or from another job's checkpoint."""
        run, handles = self._run, self._handles[:size]
        parts: dict[str, Any] = {"trainer": trainer}
        if reduction == "stock":
            slots = run.world.base.reduction.slots
            parts["reduction"] = {"kind": "stock", "slots": slots, "world_size": size}
        spec = run.world.spec(parts=parts, trainer_ranks=size)
        name = f"{trainer}-{size}-{reduction}"
        try:
            group = start_trainer(run.world, spec, handles)
            if origin:
                group.ensure_at(self._saved / origin, self._states[origin])
            todo = [step for step in self._reference.drawn if not origin or step.step > SAVED]
            saves = not origin and name not in self._states
            leg = replay(
                group,
                spec,
                todo,
                save=lambda step: self._saved / name if saves and step == SAVED else None,
            )
            if leg.states:
                (self._states[name],) = leg.states.values()
            return leg
        finally:
            left = [handle.run("tools.gpu.legs:leave_groups") for handle in handles]
            gather(left, what="end of a trainer", timeout_s=30)

    def told(self, leg: Leg) -> dict[str, Any]:
        found = first_difference(self._reference.digests, leg.digests, ignoring=NOT_REPLAYED)
        return {
            "as the reference": found or "identical",
            "norms": leg.norms,
            "update_s": [round(s, 3) for s in leg.seconds["update_s"]],
        }


def launches(run: Run) -> Results:
    """Ring and Tree, in fresh processes each."""
    spec = run.world.spec()
    number = LAUNCHES if run.device == "cuda" else 2
    for role, env in (("trainer", trainer_env(spec)), ("rollout", engine_env(spec))):
        found = _launch(run, env)
        yield f"{role}'s variables, from inside", found
        require_asked(env, [found])
    for algorithm in ("Ring", "Tree"):
        env = {"NCCL_ALGO": algorithm, "NCCL_NVLS_ENABLE": "0"}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            turns = [pool.submit(_launch, run, env) for _ in range(number)]
            all_found = [turn.result() for turn in turns]
        outcomes = {json.dumps(one["digests"], sort_keys=True) for one in all_found}
        said = {
            what: sorted({line for one in all_found for line in one[what]})
            for what in ("nccl says", "nccl chose")
        }
        yield (
            f"{algorithm}, {number} launches",
            {
                "ranks": run.ranks,
                "different outcomes": len(outcomes),
                "variables": all_found[0]["variables"],
                **said,
                "digests": all_found[0]["digests"],
                "milliseconds of the last launch": all_found[-1]["milliseconds"],
            },
        )
        require_asked(env, all_found)


def require_asked(env: Mapping[str, str], launches: Sequence[Mapping[str, Any]]) -> None:
    """Require that each launch had NCCL's variables, and ran the algorithm where its log names one.

    Raises:
        AssertionError: With what was asked for and what was found.
    """
    asked = {name: value for name, value in env.items() if name.startswith("NCCL_")}
    for found in launches:
        variables = {name: found["variables"].get(name) for name in asked}
        assert variables == asked, f"asked for {asked}, a process has {variables}"
        if "NCCL_ALGO" in asked:
            wanted = asked["NCCL_ALGO"].rpartition(":")[2].upper()
            sums = [row.split() for row in found["nccl chose"] if row.startswith("AllReduce ")]
            others = [row for row in sums if row[2].upper() != wanted]
            assert not others, f"asked for {asked['NCCL_ALGO']}, NCCL ran {others}"


def _launch(run: Run, env: dict[str, str]) -> dict[str, Any]:
    """Start one rank a GPU; return what rank 0 found, with NCCL's own words if they were asked."""
    folder = Path(tempfile.mkdtemp(dir=run.scratch, prefix="launch-"))
    log = folder / "nccl-%p.log"
    program = [sys.executable, "-m", "tools.gpu.launches"]
    ends = [f"file://{folder}/rendezvous", str(folder / "out.json"), "--device", run.device]
    started = [
        subprocess.Popen(
            [*program, str(rank), str(run.ranks), *ends],
            env={**os.environ, **env, **SAYS_WHAT_RAN, "NCCL_DEBUG_FILE": str(log)},
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
    "ranks": (ranks, 240),
    "widest": (widest, 100),
    "launches": (launches, 120),
    "float64": (float64, 100),
}
"""Name -> (function, limit in seconds)."""


if __name__ == "__main__":
    main(PARTS, description=__doc__ or "", module="tools.gpu.two_gpus")
