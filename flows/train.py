"""One leg of a recipe to its gates, from nothing or from a checkpoint.

python -m flows.train
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import State

from engines import runs
from engines.checkpoint.retention import disk_need, require_disk
from engines.provenance.diff import Comparison
from flows.conclusion import conclude
from flows.fork import branch_off
from flows.legs import forget_verdict, recorded_result, run_leg
from flows.run_request import ResumeRequest, TrainRequest, run_at_step, run_name
from model_specs.errors import SpecError
from model_specs.fingerprint import spec_differences
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tasks import compare
from tasks.compare import LegResult


@flow(name="train", flow_run_name=run_name)
def train(request: TrainRequest, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Run one leg, or go on with a run; green is `Aligned`.

    Args:
        request: Recipe or run, and overrides.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    if request.resume:
        name, step = run_at_step(request.resume)
        return go_on(name, step, request.assignments, leg="a", runs_dir=runs_dir)
    if request.fork:
        name, step = run_at_step(request.fork)
        return branch_off(
            name, step, request.assignments, leg="a", runs_dir=runs_dir, run_id=run_id
        )
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    require_disk(disk_need(spec, start_step=0), runs_dir)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    return conclude(run, (run_leg(spec, run, "a"),))


@flow(name="resume", flow_run_name=run_name)
def resume(request: ResumeRequest, runs_dir: str = "runs") -> State:
    """Go on from a committed checkpoint in a new attempt; later ledger lines are dropped.

    Args:
        request: Run, leg and step, and overrides of plan or execution.
        runs_dir: Folder that holds run folders.
    """
    run, step = run_at_step(request.run)
    return go_on(run, step, request.assignments, leg=request.leg, runs_dir=runs_dir)


def go_on(
    run: str, step: int | None, overrides: tuple[str, ...], *, leg: str, runs_dir: str
) -> State:
    """Go on from a committed checkpoint; see `resume`.

    Where the run has other legs, they are compared with this one again: what was found before was
    found of a ledger that is no longer there.
    """
    folder, spec, start = resumption(run, step, overrides, leg=leg, runs_dir=runs_dir)
    opened = runs.reopen(folder)
    forget_verdict(folder)
    runs.write_spec(folder, spec)
    result = run_leg(spec, opened, leg, resume_step=start)
    ended, unended = [], []
    for other in sorted({*runs.legs(folder)} - {leg}):
        found = recorded_result(folder, other)
        if found is not None and found.chain_digest:
            ended.append(found)
        else:
            unended.append(other)
    more: dict[str, Any] = {"resumed": {"leg": leg, "step": start}}
    if unended:
        compared = f"with leg {', '.join(found.leg for found in ended)}" if ended else "by itself"
        more["about"] = (
            f"leg {leg} {compared}, since leg {', '.join(unended)} has not ended (lockstep resume "
            f"{folder.name} --leg {unended[0]})"
        )
    if not (ended and result.chain_digest):
        return conclude(opened, (result, *ended), more=more)
    legs = sorted((result, *ended), key=lambda found: found.leg)
    return conclude(opened, legs, _worst_comparison(folder, result, ended), more=more)


def _worst_comparison(folder: Path, leg: LegResult, others: Sequence[LegResult]) -> Comparison:
    """The first comparison of a leg with another that is not green, else the last.

    A resumed leg has its own stages of before in its folder; legs share none.
    """
    found: list[Comparison] = []
    for other in others:
        names = sorted((leg.leg, other.leg))
        found.append(compare.compare_folders(folder / names[0], folder / names[1]))
    return next((one for one in found if not one.verdict.is_green), found[-1])


def resumption(
    run: str, step: int | None, overrides: tuple[str, ...], *, leg: str, runs_dir: str
) -> tuple[Path, RunSpec, int]:
    """Find what to go on with, and change nothing: the run folder, the new spec, the start.

    Raises:
        SpecError: There is no such run, an override changes the trajectory, no step is left to
            be trained, or the checkpoints would not fit on the disk.
        CheckpointError: The leg has no committed checkpoint, or none of this step.
    """
    folder = runs.open_run(run, Path(runs_dir))
    spec = resumable(runs.read_spec(folder), overrides)
    start, _ = runs.checkpoint_at(folder / leg, step)
    if start >= spec.plan.num_steps:
        present = sorted(runs.checkpoints(folder / leg))
        raise SpecError(
            f"leg {leg} of {folder.name} is at step {start} and plan.num_steps="
            f"{spec.plan.num_steps}: no step is left; go on past it by --set plan.num_steps=..., "
            f"or from an earlier checkpoint by RUN@STEP (it has {present})"
        )
    require_disk(disk_need(spec, start_step=start), folder)
    return folder, spec, start


def resumable(spec: RunSpec, overrides: tuple[str, ...]) -> RunSpec:
    """Apply overrides that leave the trajectory as it is; any other is refused."""
    changed = apply_overrides(spec, overrides)
    differing = [d for d in spec_differences(spec, changed) if not d[0].startswith("plan.")]
    if differing:
        rows = "; ".join(f"{field}: {old!r} -> {new!r}" for field, old, new in differing)
        raise SpecError(f"a resumed run keeps its trajectory, but these fields change: {rows}")
    return changed


if __name__ == "__main__":
    train(TrainRequest(recipe="tiny_cpu"))
