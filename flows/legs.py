"""One complete execution: download, convert, train with checkpoints, export, gates."""

from __future__ import annotations

import logging
from pathlib import Path

from engines import runs
from engines.contracts import Flip
from engines.plan import segment_stops
from engines.provenance.verdict import Verdict
from model_specs.errors import (
    CheckpointError,
    DivergedError,
    EngineError,
    LockstepError,
    UnsupportedError,
)
from model_specs.run_spec import RunSpec
from tasks import checkpoint, convert, download, export, filter_prompts, gates, tracking, train
from tasks.compare import LegResult
from tasks.session import leg_session

logger = logging.getLogger("lockstep")

_VERDICTS: dict[type[LockstepError], Verdict] = {
    EngineError: Verdict.ENGINE_FAILURE,
    DivergedError: Verdict.DIVERGED,
    UnsupportedError: Verdict.UNSUPPORTED,
}


def run_leg(
    spec: RunSpec,
    run: runs.Run,
    leg: str,
    *,
    resume_step: int = 0,
    flip: Flip | None = None,
) -> LegResult:
    """Run one leg to its gates; an error that is a verdict is returned as one, to be reported."""
    try:
        return _run_leg(spec, run, leg, resume_step=resume_step, flip=flip)
    except (EngineError, DivergedError, UnsupportedError) as error:
        logger.error("%s %s", leg, error)
        return LegResult(
            leg=leg,
            verdict=next(v for kind, v in _VERDICTS.items() if isinstance(error, kind)),
            reason=str(error),
            chain_digest="",
            last_step=resume_step,
            gates={},
            processes={},
            cached_stages=0,
        )


def _run_leg(
    spec: RunSpec, run: runs.Run, leg: str, *, resume_step: int, flip: Flip | None
) -> LegResult:
    with leg_session(spec, run_dir=run.folder, leg=leg, fence=run.fence, flip=flip) as session:
        name = session.name
        inputs = download.download(name)
        weights = convert.convert(name, inputs.model)
        train.start_engines(name, inputs.model, inputs.data, weights)
        gates.preflight(name)
        if spec.filter is not None:
            filter_prompts.filter_prompts(name, weights)
        state = runs.checkpoints(session.folder)[resume_step] if resume_step else weights
        step = resume_step
        for stop in segment_stops(spec.plan, resume_step):
            segment = train.train_segment(name, state, start_step=step, to_step=stop)
            tracking.sync_quietly(run.folder)
            step = segment.end_step
            if segment.stopped_by:
                return gates.judge(name, last_step=step)
            state = checkpoint.checkpoint(name, segment)
        exported = export.export(name, state, inputs.model)
        gates.controls(name, exported)
        return gates.judge(name, last_step=step)


def gate_leg(spec: RunSpec, run: runs.Run, source: Path) -> LegResult:
    """Run the gates alone on the newest checkpoint of the leg in `source`."""
    found = runs.checkpoints(source)
    if not found:
        raise CheckpointError(f"{source} has no committed checkpoint to run the gates on")
    step = max(found)
    with leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as session:
        name = session.name
        inputs = download.download(name)
        weights = convert.convert(name, inputs.model)
        train.start_engines(name, inputs.model, inputs.data, weights)
        gates.preflight(name)
        if spec.filter is not None:
            filter_prompts.filter_prompts(name, weights)
        train.load_state(name, found[step], step=step)
        exported = export.export(name, found[step], inputs.model)
        gates.controls(name, exported)
        return gates.judge_without_steps(name, step=step)
