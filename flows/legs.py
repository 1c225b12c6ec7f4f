"""One complete execution, and the parts of one: a segment, the gates, a rollout, its training.

A leg is download, convert, train with checkpoints, export, gates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engines import runs
from engines.contracts import ArtifactRef, Flip
from engines.plan import segment_stops
from engines.provenance.verdict import Verdict
from engines.rollout_dump import RolloutDump
from model_specs.errors import DivergedError, EngineError, LockstepError, UnsupportedError
from model_specs.json_text import read_json
from model_specs.run_spec import GatePlan, PlanSpec, RunSpec
from model_specs.variation import Variation
from tasks import (
    checkpoint,
    convert,
    download,
    export,
    filter_prompts,
    gates,
    replay,
    tracking,
    train,
)
from tasks.compare import LegResult
from tasks.session import leg_session

logger = logging.getLogger("lockstep")

RESULT = "result.json"
"""What a leg ended with, beside its ledger; absent while it runs and where it was cut off."""

_VERDICTS: dict[type[LockstepError], Verdict] = {
    EngineError: Verdict.ENGINE_FAILURE,
    DivergedError: Verdict.DIVERGED,
    UnsupportedError: Verdict.UNSUPPORTED,
}
VERDICT_ERRORS = tuple(_VERDICTS)
"""Errors that are the verdict of a leg."""


def run_leg(
    spec: RunSpec,
    run: runs.Run,
    leg: str,
    *,
    resume_step: int = 0,
    resume_from: str | None = None,
    flip: Flip | None = None,
    variation: Variation | None = None,
    before_steps: Callable[[str], object] | None = None,
) -> LegResult:
    """Run one leg to its gates; an error that is a verdict is returned as one, to be reported.

    A leg that goes on from a checkpoint of its own is judged by its earlier steps too.

    Args:
        spec: What is run.
        run: The run that the leg belongs to.
        leg: Name and folder of the leg.
        resume_step: Committed checkpoint to go on from; 0 begins with the initial weights.
        resume_from: Leg that has this checkpoint; None is the leg itself.
        flip: One bit of a live value to be flipped.
        variation: What this process was started under on purpose.
        before_steps: Called with the name of the session when its engines have started.
    """
    forget_result(run.folder, leg)
    try:
        with leg_session(
            spec,
            run_dir=run.folder,
            leg=leg,
            fence=run.fence,
            flip=flip,
            variation=variation,
        ) as session:
            source = run.folder / (resume_from or leg)
            inputs, weights = _start(session.name, spec)
            if before_steps is not None:
                before_steps(session.name)
            state = weights
            if resume_step:
                state = runs.checkpoints(source)[resume_step]
            elif spec.origin is not None:
                state = checkpoint.adopt(session.name)
            start = session.start_from = resume_step or spec.start_step
            if resume_step and source == run.folder / leg:
                train.recall_steps(session.name, resume_step)
            result = _steps_to_gates(session.name, spec.plan, run, state, inputs.model, start=start)
    except VERDICT_ERRORS as error:
        result = _failed(leg, error, last_step=resume_step)
    run.fence.check()
    runs.write_json(run.folder / leg / RESULT, asdict(result))
    return result


def recorded_result(folder: Path, leg: str) -> LegResult | None:
    """What a leg of the run in `folder` ended with; None where it has not ended."""
    path = folder / leg / RESULT
    return LegResult.from_dict(read_json(path)) if path.is_file() else None


def forget_result(folder: Path, leg: str) -> None:
    """Drop what a leg ended with before it is run again or goes on."""
    (folder / leg / RESULT).unlink(missing_ok=True)


def forget_verdict(folder: Path) -> None:
    """Drop what a run ended with: what is cut off from here on leaves none that was true before."""
    for name in ("verdict.json", "report.html", "report.md"):
        (folder / name).unlink(missing_ok=True)


def _failed(leg: str, error: LockstepError, *, last_step: int) -> LegResult:
    logger.error("%s %s", leg, error)
    verdict = next(v for kind, v in _VERDICTS.items() if isinstance(error, kind))
    return LegResult.failed(leg, str(error), verdict=verdict, last_step=last_step)


def _start(name: str, spec: RunSpec) -> tuple[download.Inputs, ArtifactRef]:
    """Bring a session to where it can draw: inputs, converted weights, engines, its prompts."""
    inputs = download.download(name)
    weights = convert.convert(name, inputs.model)
    train.start_engines(name, inputs.model, inputs.data, weights, inputs.evals)
    gates.preflight(name)
    if spec.filter is not None:
        # A fork has what its parent kept, unless its filter is another: its own draws may differ.
        filter_prompts.filter_prompts(name, weights, again=spec.origin is None)
    return inputs, weights


def _steps_to_gates(
    name: str, plan: PlanSpec, run: runs.Run, state: ArtifactRef, model: ArtifactRef, *, start: int
) -> LegResult:
    """Train from `state` to the end of the plan, with its checkpoints; export and judge."""
    step = start
    for stop in segment_stops(plan, start):
        segment = train.train_segment(name, state, start_step=step, to_step=stop)
        tracking.sync_quietly(run.folder)
        step = segment.end_step
        if segment.stopped_by:
            return gates.judge(name, last_step=step)
        state = checkpoint.checkpoint(name, segment)
    exported = export.export(name, state, model)
    gates.layerwise(name)
    gates.controls(name, exported)
    return gates.judge(name, last_step=step)


def gate_leg(spec: RunSpec, run: runs.Run, source: Path) -> LegResult:
    """Run the gates alone on the newest checkpoint of the leg in `source`."""
    step, found = runs.checkpoint_at(source, None)
    try:
        with leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as session:
            name = session.name
            inputs, _ = _start(name, spec)
            train.load_state(name, found, step=step)
            exported = export.export(name, found, inputs.model)
            gates.layerwise(name)
            gates.controls(name, exported)
            return gates.judge_without_steps(name, step=step)
    except VERDICT_ERRORS as error:
        return _failed("a", error, last_step=step)


def segment_leg(
    spec: RunSpec, run: runs.Run, start: ArtifactRef | None, *, start_step: int, to_step: int
) -> LegResult:
    """Run the steps after `start_step` again, in fresh engines and a ledger of their own.

    Args:
        spec: Spec of the run that is verified; its gates are left out, since its own were judged.
        run: The scratch run.
        start: Checkpoint of `start_step`; None for the run's initial weights.
        start_step: Step that the segment begins after.
        to_step: Its last step.
    """
    gates_off = GatePlan(
        preflight="off", logprobs="off", layerwise="off", controls="off", stop_on_red=False
    )
    plan = spec.plan.model_copy(update={"gates": gates_off, "evals": ()})
    scratch = spec.model_copy(update={"plan": plan})
    try:
        with leg_session(scratch, run_dir=run.folder, leg="a", fence=run.fence) as session:
            name = session.name
            _, weights = _start(name, scratch)
            segment = train.train_segment(
                name, start or weights, start_step=start_step, to_step=to_step
            )
            return gates.judge(name, last_step=segment.end_step)
    except VERDICT_ERRORS as error:
        return _failed("a", error, last_step=start_step)


def rollout_leg(spec: RunSpec, run: runs.Run) -> tuple[Path, ...]:
    """Draw and reward all steps at the weights that the run begins with; return the dumps."""
    with leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as session:
        name = session.name
        _start(name, spec)
        return replay.draw_steps(name)


def replay_leg(
    spec: RunSpec, run: runs.Run, dumps: tuple[RolloutDump, ...], start: ArtifactRef | None
) -> LegResult:
    """Train on dumped rollouts, without a rollout engine, from `start` or the initial weights."""
    try:
        with leg_session(
            spec, run_dir=run.folder, leg="a", fence=run.fence, with_rollout=False
        ) as session:
            name = session.name
            inputs = download.download(name)
            weights = convert.convert(name, inputs.model)
            replay.start_trainer(name, weights)
            segment = replay.train_dumps(name, start or weights, dumps)
            return gates.judge(name, last_step=segment.end_step)
    except VERDICT_ERRORS as error:
        return _failed("a", error, last_step=dumps[0].drawn.step - 1)
