"""The log-prob gate: trainer and rollout must give every sampled token the same bits.

Invariant: a token counts as exact only when both values have the same bits, so 0.0 and -0.0
differ, a NaN is never exact, and neither is an infinity (a token that was sampled had a
probability). A missing, extra or doubled request and a length that does not fit are Misaligned by
name. Figures do not depend on the order of the samples. The window as a whole is Vacuous when
nothing could have gone wrong.

    step_gate = compare_logprobs(step, samples, trainer.scores())
    gate = LogprobGate()
    gate.add(step_gate)
    result = gate.final(groups_with_variance=3, max_grad_norm=0.8, changed_weights=26)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.contracts import Sample
from engines.provenance.evidence_time import evidence
from engines.provenance.verdict import Verdict
from model_specs.json_text import jsonable

GATE = "gate:"
"""Begins the violations of this gate in a ledger; any other is of weights that did not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """Where rollout and trainer differ most."""

    request_id: str
    prompt_id: str
    position: int
    """0-based among the sampled tokens."""
    token_id: int
    rollout: float
    trainer: float

    def describe(self) -> str:
        """Say where, and both values, exactly."""
        return (
            f"prompt {self.prompt_id} ({self.request_id}) position {self.position} token "
            f"{self.token_id}: rollout {self.rollout!r} ({self.rollout.hex()}), trainer "
            f"{self.trainer!r} ({self.trainer.hex()})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGate:
    """The figures of one step."""

    step: int
    num_tokens: int
    num_exact: int
    num_nonfinite: int | None
    """Tokens with a NaN or an infinity on either side; None where only a ledger knows the step."""
    max_abs_diff: float
    """Largest absolute difference in nats; NaN when a NaN was seen."""
    mean_abs_diff: float
    p999_abs_diff: float
    """99.9th percentile, the next larger observed value."""
    worst: WorstToken | None
    """None when every token is exact."""
    faults: tuple[str, ...]
    """Requests that could not be compared, by name."""
    worst_by_request: Mapping[str, float] = field(default_factory=dict)
    """Request id -> largest absolute difference."""
    recorded: tuple[str, ...] = ()
    """Violations as a ledger has them, of a step that was compared in an earlier attempt."""

    @property
    def exact_fraction(self) -> float:
        """Share of tokens with equal bits; 0.0 without a token."""
        return self.num_exact / self.num_tokens if self.num_tokens else 0.0

    @property
    def aligned(self) -> bool:
        """Whether every token is exact and every request could be compared."""
        return not (self.faults or self.recorded) and self.num_exact == self.num_tokens

    def violations(self, *, on_report: bool = False) -> tuple[str, ...]:
        """Say what did not hold, as the ledger records it; empty when aligned.

        A gate that is not required lets values differ; a request that could not be compared and a
        NaN are faults in any mode.
        """
        if self.recorded:
            return self.recorded
        found = [f"{GATE} step {self.step}: {fault}" for fault in self.faults]
        is_nan = math.isnan(self.max_abs_diff)
        if self.num_exact != self.num_tokens and (is_nan or not on_report):
            where = f"; worst: {self.worst.describe()}" if self.worst else ""
            found.append(
                f"{GATE} step {self.step}: {self.num_tokens - self.num_exact} of "
                f"{self.num_tokens} log-probs differ, max {self.max_abs_diff!r}{where}"
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values; floats that JSON lacks as `nan`, `inf`, `-inf`."""
        values = asdict(self) | {"exact_fraction": self.exact_fraction, "aligned": self.aligned}
        del values["worst_by_request"]
        return {name: jsonable(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The outcome of the gate over its whole window."""

    verdict: Verdict
    reason: str
    num_steps: int
    num_tokens: int
    num_exact: int
    max_abs_diff: float
    mean_abs_diff: float
    p999_abs_diff: float
    """Of the worst step."""
    groups_with_variance: int
    max_grad_norm: float
    changed_weights: int
    steps: tuple[StepGate, ...]

    @property
    def exact_fraction(self) -> float:
        """Share of tokens with equal bits; 0.0 without a token."""
        return self.num_exact / self.num_tokens if self.num_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `gates.json`."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "steps"
        }
        values |= {
            "verdict": self.verdict.value,
            "exact_fraction": self.exact_fraction,
            "steps": [step.to_dict() for step in self.steps],
        }
        return {name: jsonable(value) for name, value in values.items()}


@evidence
def compare_logprobs(
    step: int, samples: Sequence[Sample], scores: Mapping[str, Sequence[float]]
) -> StepGate:
    """Compare the rollout's log-probs with the trainer's.

    Args:
        step: Step that the samples belong to.
        samples: What the rollout drew, in any order, with its log-probs.
        scores: Request id -> the trainer's log-prob of each sampled token.
    """
    faults: list[str] = []
    by_id: dict[str, Sample] = {}
    for sample in samples:
        if sample.request_id in by_id:
            faults.append(f"request {sample.request_id} was answered twice by the rollout")
        by_id[sample.request_id] = sample
    faults += [
        f"request {name} was not scored by the trainer"
        for name in sorted(by_id.keys() - scores.keys())
    ]
    faults += [
        f"request {name} was scored but never drawn"
        for name in sorted(scores.keys() - by_id.keys())
    ]
    rows: list[tuple[Sample, npt.NDArray[np.float64], npt.NDArray[np.float64]]] = []
    for name in sorted(by_id.keys() & scores.keys()):
        sample, score = by_id[name], scores[name]
        lengths = (len(sample.token_ids), len(sample.logprobs), len(score))
        if len(set(lengths)) != 1:
            faults.append(
                f"request {name} has {lengths[0]} tokens, {lengths[1]} rollout log-probs and "
                f"{lengths[2]} trainer log-probs"
            )
            continue
        # float64 holds float32 exactly and does not hide a trainer that answers in more bits.
        rows.append(
            (sample, np.asarray(sample.logprobs, np.float64), np.asarray(score, np.float64))
        )
    return _figures(step, rows, tuple(faults))


def _figures(
    step: int,
    rows: Sequence[tuple[Sample, npt.NDArray[np.float64], npt.NDArray[np.float64]]],
    faults: tuple[str, ...],
) -> StepGate:
    empty = np.zeros(0, np.float64)
    rollout = np.concatenate([row[1] for row in rows] or [empty])
    trainer = np.concatenate([row[2] for row in rows] or [empty])
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    exact = (rollout.view(np.uint64) == trainer.view(np.uint64)) & finite
    with np.errstate(invalid="ignore"):
        diff = np.where(exact, 0.0, np.abs(rollout - trainer))
    starts = np.cumsum([0, *(row[1].size for row in rows)])
    by_request = {
        row[0].request_id: float(diff[start:stop].max()) if stop > start else 0.0
        for row, start, stop in zip(rows, starts[:-1], starts[1:], strict=True)
    }
    return StepGate(
        step=step,
        num_tokens=diff.size,
        num_exact=int(exact.sum()),
        num_nonfinite=int((~finite).sum()),
        max_abs_diff=float(diff.max()) if diff.size else 0.0,
        mean_abs_diff=math.fsum(diff) / diff.size if diff.size else 0.0,
        p999_abs_diff=float(np.quantile(diff, 0.999, method="higher")) if diff.size else 0.0,
        worst=_worst(rows, starts, diff, exact),
        faults=faults,
        worst_by_request=by_request,
    )


def _worst(
    rows: Sequence[tuple[Sample, npt.NDArray[np.float64], npt.NDArray[np.float64]]],
    starts: npt.NDArray[np.int64],
    diff: npt.NDArray[np.float64],
    exact: npt.NDArray[np.bool_],
) -> WorstToken | None:
    if exact.all():
        return None
    # A NaN is worst of all; an inexact token with difference 0.0 (signed zeros) beats an exact one.
    rank = np.where(exact, -1.0, np.where(np.isnan(diff), np.inf, diff))
    token = int(np.argmax(rank))
    row = int(np.searchsorted(starts, token, side="right")) - 1
    sample, rollout, trainer = rows[row]
    position = token - int(starts[row])
    return WorstToken(
        request_id=sample.request_id,
        prompt_id=sample.prompt_id,
        position=position,
        token_id=sample.token_ids[position],
        rollout=float(rollout[position]),
        trainer=float(trainer[position]),
    )


class LogprobGate:
    """Collects the steps of a window and judges it as a whole."""

    def __init__(self) -> None:
        self._steps: list[StepGate] = []

    @property
    def steps(self) -> tuple[StepGate, ...]:
        """The steps seen so far, in the order they were added."""
        return tuple(self._steps)

    def add(self, step_gate: StepGate) -> None:
        """Count a step that was compared elsewhere."""
        self._steps.append(step_gate)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is red in any mode: requests that could not be compared, and NaN."""
        return tuple(fault for step in self._steps for fault in step.violations(on_report=True))

    def final(
        self, *, groups_with_variance: int, max_grad_norm: float, changed_weights: int
    ) -> GateResult:
        """Judge the window.

        Args:
            groups_with_variance: Groups of the window whose rewards were not all equal.
            max_grad_norm: Largest gradient norm of any update.
            changed_weights: Tensors changed by any update, counted over all of them.

        Returns:
            Misaligned on any difference, fault or NaN; else Vacuous when nothing was at stake;
            else Aligned.
        """
        steps = self._steps
        num_tokens = sum(step.num_tokens for step in steps)
        total = math.fsum(step.mean_abs_diff * step.num_tokens for step in steps)
        verdict, reason = self._judge(groups_with_variance, max_grad_norm, changed_weights)
        return GateResult(
            verdict=verdict,
            reason=reason,
            num_steps=len(steps),
            num_tokens=num_tokens,
            num_exact=sum(step.num_exact for step in steps),
            max_abs_diff=largest([step.max_abs_diff for step in steps]),
            mean_abs_diff=total / num_tokens if num_tokens else 0.0,
            p999_abs_diff=largest([step.p999_abs_diff for step in steps]),
            groups_with_variance=groups_with_variance,
            max_grad_norm=max_grad_norm,
            changed_weights=changed_weights,
            steps=tuple(steps),
        )

    def _judge(
        self, groups_with_variance: int, max_grad_norm: float, changed_weights: int
    ) -> tuple[Verdict, str]:
        violations = [violation for step in self._steps for violation in step.violations()]
        if violations:
            more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
            return Verdict.MISALIGNED, violations[0] + more
        if not math.isfinite(max_grad_norm):
            return Verdict.MISALIGNED, f"the gradient norm was {max_grad_norm}"
        num_tokens = sum(step.num_tokens for step in self._steps)
        if not num_tokens:
            return Verdict.VACUOUS, f"no token was compared in {len(self._steps)} steps"
        if not groups_with_variance:
            return Verdict.VACUOUS, "no group had rewards that differ, so nothing was learned"
        if max_grad_norm == 0.0:
            return Verdict.VACUOUS, "the gradient norm was 0 at every update"
        if not changed_weights:
            return Verdict.VACUOUS, "no update changed a weight"
        return Verdict.ALIGNED, f"{num_tokens} of {num_tokens} log-probs have equal bits"


def largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if there is one, which `max` would lose; 0.0 for none."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=0.0)
