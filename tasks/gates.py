"""The gates of a leg: preflight, log-probs and their two controls, layers; the leg's verdict."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.cluster import gather_work
from engines.contracts import ArtifactRef, Sample, SampleRequest, TrainSample
from engines.data import prompt_order
from engines.gates.controls import ControlResult, judge_native, judge_stock
from engines.gates.layerwise import compare_layers
from engines.gates.logprobs import compare_logprobs
from engines.gates.preflight import require_allowed
from engines.loop import push, sample_requests
from engines.placement import engine_name, start_on
from engines.provenance.ledger import LEDGER_FILE, read_ledger
from engines.provenance.lock import read_lock
from engines.provenance.verdict import Verdict, worst
from engines.rollout.group import engine_env
from engines.runs import write_json
from tasks.compare import LegResult
from tasks.session import ROLLOUT_ENGINE, LegSession, session
from tasks.stage import stage

CONTROL_SAMPLES_PER_PROMPT = 8
"""Enough tokens that the largest difference is no accident where answers are short."""
_HEADLINE = ("logprobs", "exported weights", "preflight")
"""Gate whose figure says most, first that was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRecord:
    """One row of gates.json."""

    verdict: Verdict
    """What was found; for the native control Misaligned is what has to be found."""
    holds: bool
    """Whether the gate is green."""
    weight: Verdict
    """What the leg ends with when a required gate is not green."""
    summary: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "verdict": str(self.verdict),
            "holds": self.holds,
            "summary": self.summary,
            "figures": dict(self.figures),
        }


@stage("preflight", version=1)
def preflight(session_name: str) -> dict[str, Any]:
    """Probe every rollout engine on the initial weights: alone, batched, cached, elsewhere."""
    opened = session(session_name)
    if opened.spec.plan.gates.preflight == "off":
        return {}
    trainer, rollout, _ = opened.engines()
    push(trainer, rollout, version=0, flip=None, keep=None)
    results = rollout.preflight()
    verdicts = {name: Verdict(result["verdict"]) for name, result in results.items()}
    verdict = worst(verdicts.values())
    reason = next(results[name]["reason"] for name in results if verdicts[name] == verdict)
    record = GateRecord(
        verdict=verdict,
        holds=verdict.is_green,
        weight=verdict,
        summary=reason,
        figures={name: dict(result) for name, result in results.items()},
    )
    opened.gates["preflight"] = record
    require_allowed(opened.spec, verdict, reason)
    return record.to_dict()


@stage("layerwise", version=1)
def layerwise(session_name: str) -> dict[str, Any]:
    """Compare every element of every decoder layer of both engines, prefill and decode."""
    opened = session(session_name)
    if opened.spec.plan.gates.layerwise == "off":
        return {}
    record = _layerwise(opened, _control_requests(opened))
    opened.gates["layerwise"] = record
    return record.to_dict()


@stage("controls", version=2)
def controls(session_name: str, exported: ArtifactRef) -> dict[str, Any]:
    """Show beside the 0.0 that native vLLM ops differ and that stock transformers is near."""
    opened = session(session_name)
    if opened.spec.plan.gates.controls == "off":
        return {}
    requests = _control_requests(opened)
    native = _native_samples(opened, exported, requests)
    trainer, rollout, _ = opened.engines()
    ours = rollout.generate(requests)
    trainer.score(_as_train_samples(ours))
    last = compare_logprobs(0, ours, trainer.scores())
    trainer.score(_as_train_samples(native))
    native_result = judge_native(native, trainer.scores())
    stock_ours, stock_native = _stock(opened, exported, ours, native)
    stock_result = judge_stock(
        ours,
        stock_ours,
        dtype=opened.spec.numerics.compute_dtype,
        band_float32=opened.spec.plan.gates.stock_band_float32,
        native=(native, stock_native),
    )
    opened.gates["exported weights"] = GateRecord(
        verdict=Verdict.ALIGNED if last.aligned else Verdict.MISALIGNED,
        holds=last.aligned,
        weight=Verdict.MISALIGNED,
        summary=f"max {last.max_abs_diff!r} over {last.num_tokens} tokens drawn after training",
        figures=last.to_dict(),
    )
    opened.gates["native control"] = _control(native_result, Verdict.VACUOUS)
    opened.gates["stock control"] = _control(stock_result, Verdict.MISALIGNED)
    return {name: record.to_dict() for name, record in opened.gates.items()}


def judge(session_name: str, *, last_step: int) -> LegResult:
    """Judge the log-prob gate over its window of steps, and end the leg."""
    opened = session(session_name)
    _judge_window(opened)
    return _end(opened, last_step)


def judge_without_steps(session_name: str, *, step: int) -> LegResult:
    """End a leg that trained nothing: its gates are those of the loaded weights."""
    return _end(session(session_name), step)


def _judge_window(opened: LegSession) -> None:
    result = opened.gate.final(
        groups_with_variance=opened.groups_with_variance,
        max_grad_norm=opened.max_grad_norm,
        changed_weights=opened.changed_weights,
    )
    reason = "" if result.verdict.is_green else f"; {(*opened.gate.faults, result.reason)[0]}"
    opened.gates["logprobs"] = GateRecord(
        verdict=result.verdict,
        holds=result.verdict.is_green,
        weight=result.verdict,
        summary=(
            f"max {result.max_abs_diff!r} over {result.num_tokens} tokens, "
            f"{result.exact_fraction:.2%} exactly equal{reason}"
        ),
        figures=result.to_dict(),
    )
    if opened.unequal_pushes:
        opened.gates["weights received"] = GateRecord(
            verdict=Verdict.MISALIGNED,
            holds=False,
            weight=Verdict.MISALIGNED,
            summary=opened.unequal_pushes[0],
        )


def _end(opened: LegSession, last_step: int) -> LegResult:
    write_json(
        opened.folder / "gates.json", {n: g.to_dict() for n, g in sorted(opened.gates.items())}
    )
    red = [record for name, record in opened.gates.items() if _required(opened, name, record)]
    on_report = not _claims_alignment(opened)
    # Nothing is claimed about alignment, so nothing was shown: such a leg is never Aligned.
    base = Verdict.VACUOUS if on_report else Verdict.ALIGNED
    verdict = worst([base, *(record.weight for record in red)])
    reason = next(
        (record.summary for record in red if record.weight == verdict),
        next((opened.gates[name].summary for name in _HEADLINE if name in opened.gates), ""),
    )
    if on_report and not red:
        setting = opened.spec.plan.gates.logprobs
        is_set = "on report" if setting == "report" else setting
        reason = f"the log-prob gate is {is_set}, so no alignment is claimed; measured: {reason}"
    rows = read_lock(opened.folder)
    has_ledger = (opened.folder / LEDGER_FILE).is_file()
    return LegResult(
        leg=opened.leg,
        verdict=verdict,
        reason=reason,
        on_report=on_report and not red,
        chain_digest=read_ledger(opened.folder).chain if has_ledger else "",
        last_step=last_step,
        gates={name: record.to_dict() for name, record in opened.gates.items()},
        processes=opened.processes,
        cached_stages=sum(row.cached for row in rows),
    )


def _claims_alignment(opened: LegSession) -> bool:
    """Whether the leg may end Aligned: its log-prob gate is required, or optional and green."""
    setting = opened.spec.plan.gates.logprobs
    record = opened.gates.get("logprobs")
    return setting == "required" or (setting == "optional" and (record is None or record.holds))


def _required(opened: LegSession, name: str, record: GateRecord) -> bool:
    """Whether this record is red and counts for the leg's verdict."""
    if name == "logprobs" and opened.gate.faults:
        return True
    plan = opened.spec.plan.gates
    settings = {
        "preflight": plan.preflight,
        "logprobs": plan.logprobs,
        "layerwise": plan.layerwise,
    }
    setting = settings.get(name, plan.controls if name.endswith("control") else "required")
    return setting == "required" and not record.holds


def _layerwise(opened: LegSession, requests: Sequence[SampleRequest]) -> GateRecord:
    """Compare every layer over one sample a prompt; what was recorded is kept only when red.

    The summary names that subset: of the other samples nothing is said here.
    """
    trainer, rollout, _ = opened.engines()
    folder = opened.folder / "layers"
    shutil.rmtree(folder, ignore_errors=True)
    firsts = [request for request in requests if request.sample_index == 0]
    (samples,) = gather_work(
        [rollout.call_first("layer_states", firsts, folder=str(folder))],
        what="hidden states of the rollout",
        execution=opened.spec.execution,
    )
    trainer.layer_states(_as_train_samples(samples), folder=folder)
    lengths = {request.request_id: len(request.prompt_token_ids) for request in firsts}
    result = compare_layers(folder, lengths, num_layers=opened.spec.model.num_layers)
    if result.verdict.is_green:
        shutil.rmtree(folder)
    return GateRecord(
        verdict=result.verdict,
        holds=result.verdict.is_green,
        weight=result.verdict,
        summary=f"the first sample of each of {len(firsts)} prompts: {result.reason}",
        figures=result.to_dict(),
    )


def _control(result: ControlResult, weight: Verdict) -> GateRecord:
    """A control as a gate: what it found, and what it means when it does not hold."""
    exact = result.exact_fraction == 1.0
    near = Verdict.ALIGNED if result.holds else Verdict.MISALIGNED
    found = near if result.name == "stock" else (Verdict.ALIGNED if exact else Verdict.MISALIGNED)
    return GateRecord(
        verdict=found,
        holds=result.holds,
        weight=weight,
        summary=result.reason,
        figures=result.to_dict(),
    )


def _control_requests(opened: LegSession) -> tuple[SampleRequest, ...]:
    """A few samples of each prompt of the step after the last, from seeds of their own."""
    _, _, prompts = opened.engines()
    step = opened.spec.plan.num_steps + 1
    chosen = [prompts.prompts[i] for i in prompt_order(len(prompts.prompts), opened.spec, step)]
    sampling = opened.spec.sampling.model_copy(
        update={"samples_per_prompt": CONTROL_SAMPLES_PER_PROMPT}
    )
    return sample_requests(chosen, opened.spec.model_copy(update={"sampling": sampling}), step)


def _native_samples(
    opened: LegSession, exported: ArtifactRef, requests: Sequence[SampleRequest]
) -> tuple[Sample, ...]:
    """Let vLLM on its own ops draw from the exported weights, in a process of its own."""
    env = engine_env(opened.spec, policy="native")
    gpu = opened.placement.get(engine_name(0))
    host = opened.cluster.start("native-0", **start_on(gpu, env))
    gather_work(
        [
            host.actor.create.remote(
                ROLLOUT_ENGINE,
                exported.uri,
                opened.spec.model_dump_json(),
                policy="native",
            )
        ],
        what="start of the native control",
        execution=opened.spec.execution,
    )
    (samples,) = gather_work(
        [host.call("generate", list(requests))],
        what="native control",
        execution=opened.spec.execution,
    )
    opened.cluster.stop(host)
    return tuple(samples)


def _stock(
    opened: LegSession,
    exported: ArtifactRef,
    ours: Sequence[Sample],
    native: Sequence[Sample],
) -> list[dict[str, list[float]]]:
    return gather_work(
        [
            opened.trainer_hosts[0].run(
                "engines.gates.controls:stock_logprobs",
                exported.uri,
                list(samples),
                temperature=opened.spec.sampling.temperature,
                dtype=opened.spec.numerics.compute_dtype,
            )
            for samples in (ours, native)
        ],
        what="stock control",
        execution=opened.spec.execution,
    )


def _as_train_samples(samples: Sequence[Sample]) -> tuple[TrainSample, ...]:
    return tuple(TrainSample.of(sample) for sample in samples)
