"""Start the engines and run training segments.

A segment is a function of a checkpoint: it begins with `ensure_at`, which does nothing when the
trainer already holds that state, and ends with the state's digest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import delays
from engines.cluster import gather
from engines.contracts import ArtifactRef, SegmentResult
from engines.gates.earlier_steps import earlier_steps
from engines.gates.logprobs import GATE, largest
from engines.loop import DrawnStep, StepOutcome, TensorKeeper, initial_push, push, steps
from engines.provenance.evidence_time import take_seconds
from engines.provenance.fence import write_durably
from engines.provenance.ledger import LedgerHeader, LedgerLine, LedgerWriter, read_ledger
from engines.provenance.side_files import drop_old_tensors
from engines.rollout_dump import write_dump
from model_specs.errors import CheckpointError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.json_text import jsonable
from tasks.evaluate import evaluate_before, evaluate_due, prepare_evals
from tasks.progress import show_progress
from tasks.session import LegSession, session
from tasks.stage import stage

logger = logging.getLogger("lockstep")


@stage("engines", version=1)
def start_engines(
    session_name: str,
    model: ArtifactRef,
    data: ArtifactRef,
    weights: ArtifactRef,
    evals: ArtifactRef | None = None,
) -> dict[str, dict[str, float | int]]:
    """Make the engines in the session's processes; returns their pids and start times."""
    opened = session(session_name)
    opened.start_engines(model, data, weights)
    if evals is not None:
        prepare_evals(opened, model, evals)
    return opened.processes


@stage("train", version=1)
def train_segment(
    session_name: str, start: ArtifactRef, *, start_step: int, to_step: int
) -> SegmentResult:
    """Run steps `start_step + 1` to `to_step` from the state that `start` names."""
    opened = session(session_name)
    trainer, rollout, prompts = opened.engines()
    loaded = trainer.ensure_at(start.uri, start.digest)
    ledger = open_ledger(opened, start_step=start_step)
    if ledger.num_lines:
        forget_after(opened, ledger, start_step)
    if ledger.num_lines == 0:
        outcome = initial_push(
            trainer, rollout, step=start_step, state_digest=start.digest if start_step else None
        )
        append(opened, ledger, outcome)
        if outcome.record.violations:
            return segment_result(ledger, start_step, start_step, trainer.state_digest(), outcome)
        evaluate_before(opened, start_step)
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
        keeper=keeper_of(opened),
        flip=opened.flip,
        on_drawn=dump_writer(opened) if opened.spec.plan.dump_rollouts else None,
    ):
        opened.fence.check()
        append(opened, ledger, outcome)
        last_step = outcome.record.step
        if "received" in outcome.record.digests:  # the last update: the engines hold its weights
            evaluate_due(opened, last_step)
        if outcome.record.violations and opened.spec.plan.gates.stop_on_red:
            stopped = outcome
            break
    opened.require_environment_unchanged()
    return segment_result(ledger, start_step, last_step, trainer.state_digest(), stopped)


def recall_steps(session_name: str, last_step: int) -> None:
    """Give the leg's gate what its ledger has of the steps that are not run again."""
    opened = session(session_name)
    earlier = earlier_steps(
        read_ledger(opened.folder).lines,
        last_step=last_step,
        drawn=opened.spec.prompts_drawn_per_step,
        trained=opened.spec.data.prompts_per_step,
    )
    for gate in earlier.gates:
        opened.gate.add(gate)
    opened.unequal_pushes += earlier.unequal_pushes
    opened.groups_with_variance += earlier.groups_with_variance
    opened.max_grad_norm = earlier.max_grad_norm
    opened.changed_weights += earlier.changed_weights


@stage("load", version=1)
def load_state(session_name: str, state: ArtifactRef, *, step: int) -> str:
    """Bring both engines to a checkpoint without training; returns the state digest."""
    opened = session(session_name)
    trainer, rollout, _ = opened.engines()
    trainer.ensure_at(state.uri, state.digest)
    _, _, violations = push(trainer, rollout, version=step, flip=None, keep=None)
    _note_violations(opened, violations)
    return trainer.state_digest()


def dump_writer(opened: LegSession) -> Callable[[DrawnStep], None]:
    """What writes each rollout into `rollouts/` of the leg."""
    trajectory = trajectory_fingerprint(opened.spec)

    def write(drawn: DrawnStep) -> None:
        opened.fence.check()
        write_dump(opened.folder, drawn, trajectory=trajectory)

    return write


def open_ledger(opened: LegSession, *, start_step: int = 0) -> LedgerWriter:
    """The leg's ledger, opened for appending under the session's fence.

    A ledger that is there already keeps its own first step.
    """
    return LedgerWriter(
        opened.folder,
        header=LedgerHeader(
            run_id=opened.run_dir.name,
            leg=opened.leg,
            trajectory=trajectory_fingerprint(opened.spec),
            plan=plan_fingerprint(opened.spec),
            start_step=start_step,
        ),
        fence=opened.fence,
    )


def forget_after(opened: LegSession, ledger: LedgerWriter, step: int) -> None:
    """Drop what lies after the checkpoint that this segment starts from; it is run again."""
    ledger.truncate_after(step)
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = opened.folder / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # A writer that was killed may have left its last line without an end.
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["step"] <= step]
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


def keeper_of(opened: LegSession) -> TensorKeeper | None:
    """Where tensors are kept, if at all; `append` drops those of older steps."""
    if not opened.spec.plan.keep_tensor_steps:
        return None
    return TensorKeeper(folder=str(opened.folder / "tensors"))


def take_evidence_seconds(opened: LegSession) -> float:
    """Seconds of evidence since the last call: driver, slowest rank and slowest rollout engine."""
    remote = "engines.provenance.evidence_time:take_seconds"
    hosts = [*opened.trainer_hosts, *opened.rollout_hosts]
    seconds: list[float] = gather([host.run(remote) for host in hosts], what="evidence seconds")
    num_ranks = len(opened.trainer_hosts)
    slowest_engine = max(seconds[num_ranks:], default=0.0)
    return take_seconds() + max(seconds[:num_ranks]) + slowest_engine


def _delay_figures(opened: LegSession) -> dict[str, float]:
    """How often the rollout engines slept since the last update; nothing where none is to sleep."""
    if not delays.are_asked_for():
        return {}
    hosts = opened.rollout_hosts
    counts = gather([host.run("engines.delays:take_pauses") for host in hosts], what="delays")
    return {"perf/rollout_delays": float(sum(counts))}


def append(opened: LegSession, ledger: LedgerWriter, outcome: StepOutcome) -> None:
    """Write one update everywhere: ledger, samples, metrics, progress line, the leg's gates."""
    line = ledger.append(outcome.record, outcome.values)
    record = outcome.record
    drop_old_tensors(opened.folder, record.step - opened.spec.plan.keep_tensor_steps)
    if outcome.gate is not None:
        opened.gate.add(outcome.gate)
    opened.groups_with_variance += outcome.groups_with_variance
    opened.changed_weights += outcome.changed_weights
    norm = record.metrics.get("train/grad_norm", 0.0)
    opened.max_grad_norm = largest((opened.max_grad_norm, norm))
    _note_violations(opened, record.violations)
    if record.update < 0:
        return
    if record.samples:
        if record.step == 1:
            _show_first_sample(opened, record.samples)
        append_lines(opened.folder / "samples.jsonl", record.samples)
    # The ledger's own line is part of the evidence, so it cannot hold this figure.
    metrics = {
        **record.metrics,
        **_delay_figures(opened),
        "perf/evidence_s": take_evidence_seconds(opened),
    }
    append_lines(
        opened.folder / "metrics.jsonl",
        ({"step": record.step, "update": record.update, "metrics": metrics},),
    )
    if record.update == 0:
        logger.info("%s", progress_line(opened, outcome, line))
        show_progress(opened, step=record.step)


def _note_violations(opened: LegSession, violations: tuple[str, ...]) -> None:
    for violation in violations:
        logger.warning("%s %s", opened.leg, violation)
        if not violation.startswith(GATE):
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


def append_lines(path: Path, rows: Any) -> None:
    """Append JSON lines; a NaN or an infinity, which JSON does not have, becomes its name."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(jsonable(row), sort_keys=True, allow_nan=False) + "\n")


def segment_result(
    ledger: LedgerWriter,
    start_step: int,
    end_step: int,
    state_digest: str,
    stopped: StepOutcome | None,
) -> SegmentResult:
    """Put together what a segment ended with."""
    return SegmentResult(
        start_step=start_step,
        end_step=end_step,
        state_digest=state_digest,
        chain_digest=ledger.chain,
        stopped_by=stopped.record.violations[0] if stopped and stopped.record.violations else None,
    )
