"""The two halves of a step apart: draw without training, and train on what was drawn before.

`draw_steps` leaves dumps (`engines.rollout_dump`); `train_dumps` needs no rollout engine. A step
that is trained from its dump leaves the digests that it left in its own run, apart from `received`,
since nobody receives the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from engines.contracts import ArtifactRef, SegmentResult
from engines.loop import StepOutcome, draw_step, initial_push, push, rollout_metrics, train_step
from engines.rollout_dump import RolloutDump, write_dump
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.run_spec import RunSpec
from tasks.session import session
from tasks.stage import stage
from tasks.train import (
    append,
    append_lines,
    keeper_of,
    open_ledger,
    segment_result,
    take_evidence_seconds,
)

logger = logging.getLogger("lockstep")


@stage("rollout", version=1)
def draw_steps(session_name: str) -> tuple[Path, ...]:
    """Draw, reward and dump steps 1 to `plan.num_steps` at the initial weights."""
    opened = session(session_name)
    trainer, rollout, prompts = opened.engines()
    spec = opened.spec
    push(trainer, rollout, version=0, flip=None, keep=None)
    paths = []
    for step in range(1, spec.plan.num_steps + 1):
        drawn = draw_step(rollout, spec, prompts, step=step, flip=None)
        opened.fence.check()
        trajectory = trajectory_fingerprint(spec)
        paths.append(write_dump(opened.folder, drawn, trajectory=trajectory))
        metrics = rollout_metrics(drawn, spec)
        append_lines(
            opened.folder / "metrics.jsonl", ({"step": step, "update": 0, "metrics": metrics},)
        )
        logger.info(
            "%s %d/%d reward %.2f groups %d/%d len %.0f trunc %.2f",
            opened.leg,
            step,
            spec.plan.num_steps,
            metrics["reward/mean"],
            drawn.groups_with_variance,
            spec.data.prompts_per_step,
            metrics["rollout/response_length/mean"],
            metrics["rollout/truncated_ratio"],
        )
    return tuple(paths)


@stage("trainer", version=1)
def start_trainer(session_name: str, weights: ArtifactRef) -> dict[str, dict[str, float | int]]:
    """Make the trainer alone; returns the pids and start times of its processes."""
    opened = session(session_name)
    opened.start_trainer(weights)
    opened.record_environment()
    return opened.processes


@stage("train", version=1)
def train_dumps(
    session_name: str, start: ArtifactRef, dumps: Sequence[RolloutDump]
) -> SegmentResult:
    """Train on the steps of `dumps` from the state of the step before the first of them."""
    opened = session(session_name)
    trainer = opened.trainer_alone()
    start_step = dumps[0].drawn.step - 1
    for dump in dumps:
        require_fit(dump, opened.spec)
    trainer.ensure_at(start.uri, start.digest)
    ledger = open_ledger(opened, start_step=start_step)
    first = initial_push(
        trainer, None, step=start_step, state_digest=start.digest if start_step else None
    )
    append(opened, ledger, first)
    take_evidence_seconds(opened)
    stopped: StepOutcome | None = None
    last_step = start_step
    for dump in dumps:
        for outcome in train_step(
            trainer,
            None,
            opened.spec,
            dump.drawn,
            commit=ledger.commit,
            keeper=keeper_of(opened),
        ):
            opened.fence.check()
            append(opened, ledger, outcome)
            last_step = outcome.record.step
            if outcome.record.violations and opened.spec.plan.gates.stop_on_red:
                stopped = outcome
        if stopped is not None:
            break
    opened.require_environment_unchanged()
    return segment_result(ledger, start_step, last_step, trainer.state_digest(), stopped)


def require_fit(dump: RolloutDump, spec: RunSpec) -> None:
    """Require that a dump has what one step of the spec draws, and what of it is trained on.

    Raises:
        SpecError: It has other numbers of prompts, samples or advantages; names both.
    """
    drawn = dump.drawn
    found = (len(drawn.prompts), len(drawn.samples), len(drawn.advantages))
    prompts = spec.prompts_drawn_per_step
    wanted = (prompts, prompts * spec.sampling.samples_per_prompt, spec.samples_per_step)
    if found != wanted:
        raise SpecError(
            f"{dump.path} has {found[0]} prompts and {found[1]} samples, {found[2]} of them to be "
            f"trained on, but a step of this spec has {wanted[0]} and {wanted[1]}, {wanted[2]} of "
            "them to be trained on; set data.prompts_per_step, sampling.oversample and "
            "sampling.samples_per_prompt to those of the run that drew it"
        )
