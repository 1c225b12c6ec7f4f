"""Start the engines and run training segments.

A segment is a function of a checkpoint: it begins with `ensure_at`, which does nothing when the
trainer already holds that state, and ends with the state's digest.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from engines.cluster import gather
from engines.contracts import ArtifactRef, SegmentResult
from engines.loop import StepOutcome, TensorKeeper, initial_push, push, steps
from engines.provenance.evidence_time import take_seconds
from engines.provenance.fence import write_durably
from engines.provenance.ledger import LedgerHeader, LedgerLine, LedgerWriter
from model_specs.errors import CheckpointError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from tasks.progress import show_progress
from tasks.session import LegSession, session
from tasks.stage import stage

logger = logging.getLogger("lockstep")


@stage("engines", version=1)
def start_engines(
    session_name: str, model: ArtifactRef, data: ArtifactRef, weights: ArtifactRef
) -> dict[str, dict[str, float | int]]:
    """Make the engines in the session's processes; returns their pids and start times."""
    opened = session(session_name)
    opened.start_engines(model, data, weights)
    return opened.processes


@stage("train", version=1)
def train_segment(
    session_name: str, start: ArtifactRef, *, start_step: int, to_step: int
) -> SegmentResult:
    """Run steps `start_step + 1` to `to_step` from the state that `start` names."""
    opened = session(session_name)
    trainer, rollout, prompts = opened.engines()
    loaded = trainer.ensure_at(start.uri, start.digest)
    ledger = open_ledger(opened)
    if ledger.num_lines:
        _forget_after(opened, ledger, start_step)
    if ledger.num_lines == 0:
        outcome = initial_push(trainer, rollout)
        _append(opened, ledger, outcome)
        if outcome.record.violations:
            return _result(ledger, start_step, 0, trainer.state_digest(), outcome)
    elif loaded:
        _push_again(opened, ledger, start_step)
    take_evidence_seconds(opened)  # what came before the first step belongs to no step
    stopped: StepOutcome | None = None
    last_step = start_step
    for outcome in steps(
        trainer,
        rollout,
        opened.spec,
        prompts,
        start=start_step,
        stop=to_step,
        commit=ledger.commit,
        keeper=_keeper(opened),
        flip=opened.flip,
    ):
        opened.fence.check()
        _append(opened, ledger, outcome)
        last_step = outcome.record.step
        if outcome.record.violations and opened.spec.plan.gates.stop_on_red:
            stopped = outcome
            break
    return _result(ledger, start_step, last_step, trainer.state_digest(), stopped)


@stage("load", version=1)
def load_state(session_name: str, state: ArtifactRef, *, step: int) -> str:
    """Bring both engines to a checkpoint without training; returns the state digest."""
    opened = session(session_name)
    trainer, rollout, _ = opened.engines()
    trainer.ensure_at(state.uri, state.digest)
    _, _, violations = push(trainer, rollout, version=step, flip=None, keep=None)
    _note_violations(opened, violations)
    return trainer.state_digest()


def open_ledger(opened: LegSession) -> LedgerWriter:
    """The leg's ledger, opened for appending under the session's fence."""
    return LedgerWriter(
        opened.folder,
        header=LedgerHeader(
            run_id=opened.run_dir.name,
            leg=opened.leg,
            trajectory=trajectory_fingerprint(opened.spec),
            plan=plan_fingerprint(opened.spec),
        ),
        fence=opened.fence,
    )


def _forget_after(opened: LegSession, ledger: LedgerWriter, step: int) -> None:
    """Drop what lies after the checkpoint that this segment starts from; it is run again."""
    ledger.truncate_after(step)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = opened.folder / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_durably(path, "".join(kept).encode())


def _push_again(opened: LegSession, ledger: LedgerWriter, step: int) -> None:
    """After a load the engine must hold what the ledger says it held at this step."""
    trainer, rollout, _ = opened.engines()
    _, received, violations = push(trainer, rollout, version=step, flip=None, keep=None)
    recorded = ledger.last_digests("received")
    if violations or dict(received) != dict(recorded):
        unequal = sorted(n for n in received if received[n] != recorded.get(n))
        raise CheckpointError(
            f"after loading the checkpoint of step {step} the rollout engine holds other weights "
            f"than the ledger recorded: {unequal[:3]} of {len(received)} tensors differ; the "
            "checkpoint does not belong to this ledger"
        )


def _keeper(opened: LegSession) -> TensorKeeper | None:
    plan = opened.spec.plan
    if not plan.keep_tensor_steps:
        return None
    return TensorKeeper(
        folder=str(opened.folder / "tensors"),
        from_step=plan.num_steps - plan.keep_tensor_steps + 1,
    )


def take_evidence_seconds(opened: LegSession) -> float:
    """Seconds of evidence since the last call: driver, slowest rank and slowest rollout engine."""
    remote = "engines.provenance.evidence_time:take_seconds"
    hosts = [*opened.trainer_hosts, *opened.rollout_hosts]
    seconds: list[float] = gather([host.run(remote) for host in hosts], what="evidence seconds")
    num_ranks = len(opened.trainer_hosts)
    return take_seconds() + max(seconds[:num_ranks]) + max(seconds[num_ranks:])


def _append(opened: LegSession, ledger: LedgerWriter, outcome: StepOutcome) -> None:
    line = ledger.append(outcome.record, outcome.values)
    record = outcome.record
    if outcome.gate is not None:
        opened.gate.add(outcome.gate)
    opened.groups_with_variance += outcome.groups_with_variance
    opened.changed_weights += outcome.changed_weights
    norm = record.metrics.get("train/grad_norm", 0.0)
    # `max` would lose a NaN, which the gate has to see.
    opened.max_grad_norm = norm if math.isnan(norm) else max(opened.max_grad_norm, norm)
    _note_violations(opened, record.violations)
    if record.update < 0:
        return
    if record.samples:
        if record.step == 1:
            _show_first_sample(opened, record.samples)
        _append_lines(opened.folder / "samples.jsonl", record.samples)
    # The ledger's own line is part of the evidence, so it cannot hold this figure.
    metrics = {**record.metrics, "perf/evidence_s": take_evidence_seconds(opened)}
    _append_lines(
        opened.folder / "metrics.jsonl",
        ({"step": record.step, "update": record.update, "metrics": metrics},),
    )
    if record.update == 0:
        logger.info("%s", progress_line(opened, outcome, line))
        show_progress(opened, step=record.step)


def _note_violations(opened: LegSession, violations: tuple[str, ...]) -> None:
    for violation in violations:
        logger.warning("%s %s", opened.leg, violation)
        if not violation.startswith("gate:"):
            opened.unequal_pushes.append(violation)


def _show_first_sample(opened: LegSession, samples: tuple[Any, ...]) -> None:
    row = samples[0]
    logger.info("%s prompt      %r", opened.leg, row["prompt"])
    logger.info("%s completion  %r", opened.leg, row["completion"])
    logger.info(
        "%s reward      %.2f, finish reason %s", opened.leg, row["reward"], row["finish_reason"]
    )


def progress_line(opened: LegSession, outcome: StepOutcome, line: LedgerLine) -> str:
    """One line a step, as people read it."""
    metrics = outcome.record.metrics
    spec = opened.spec
    return (
        f"{opened.leg} {outcome.record.step}/{spec.plan.num_steps}"
        f" reward {metrics['reward/mean']:.2f}"
        f" groups {outcome.groups_with_variance}/{spec.data.prompts_per_step}"
        f" len {metrics['rollout/response_length/mean']:.0f}"
        f" trunc {metrics['rollout/truncated_ratio']:.2f}"
        f" grad {metrics['train/grad_norm']:.2g}"
        f" gate {metrics['gate/logprob_abs_diff/max']}/{metrics['gate/num_tokens']:.0f}tok"
        f" chain {line.chain[:4]} {metrics['perf/step_s']:.1f}s"
    )


def _append_lines(path: Path, rows: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, sort_keys=True) + "\n")


def _result(
    ledger: LedgerWriter,
    start_step: int,
    end_step: int,
    state_digest: str,
    stopped: StepOutcome | None,
) -> SegmentResult:
    return SegmentResult(
        start_step=start_step,
        end_step=end_step,
        state_digest=state_digest,
        chain_digest=ledger.chain,
        stopped_by=stopped.record.violations[0] if stopped and stopped.record.violations else None,
    )
