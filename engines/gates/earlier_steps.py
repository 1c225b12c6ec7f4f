"""What a ledger says of steps that an earlier attempt has run, as the log-prob gate counts them.

A leg that goes on from a checkpoint is judged as a whole: a step that was red stays red, and what
was at stake before counts too.

    earlier = earlier_steps(read_ledger(folder).lines, last_step=4, drawn=4, trained=4)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engines.gates.logprobs import GATE, StepGate, largest
from engines.provenance.ledger import LedgerLine


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSteps:
    """The figures that `LogprobGate.final` judges by, of steps that are not run again."""

    gates: tuple[StepGate, ...]
    unequal_pushes: tuple[str, ...]
    groups_with_variance: int
    max_grad_norm: float
    """NaN where a step had one."""
    changed_weights: int
    """Tensors under the roots of all updates that changed any."""


def earlier_steps(
    lines: Sequence[LedgerLine], *, last_step: int, drawn: int, trained: int
) -> EarlierSteps:
    """Put together what `lines` have of the steps up to `last_step`.

    Args:
        lines: The ledger's updates, in order.
        last_step: Step of the checkpoint that the leg goes on from.
        drawn: Groups that a step draws; `reward/zero_std_groups` of them have equal rewards.
        trained: Groups that a step trains on, those whose rewards differ first.
    """
    kept = [line for line in lines if line.step <= last_step]
    norms = [line.metrics["train/grad_norm"] for line in kept if "train/grad_norm" in line.metrics]
    equal = [
        int(line.metrics["reward/zero_std_groups"])
        for line in kept
        if "reward/zero_std_groups" in line.metrics
    ]
    return EarlierSteps(
        gates=tuple(_step_gate(line) for line in kept if "gate/num_tokens" in line.metrics),
        unequal_pushes=tuple(
            violation
            for line in kept
            for violation in line.violations
            if not violation.startswith(GATE)
        ),
        groups_with_variance=sum(min(drawn - number, trained) for number in equal),
        max_grad_norm=largest(norms),
        changed_weights=sum(
            after.counts["weights"]
            for before, after in itertools.pairwise(kept)
            if before.roots.get("weights") != after.roots.get("weights")
        ),
    )


def _step_gate(line: LedgerLine) -> StepGate:
    num_tokens = int(line.metrics["gate/num_tokens"])
    return StepGate(
        step=line.step,
        num_tokens=num_tokens,
        num_exact=round(line.metrics["gate/exact_fraction"] * num_tokens),
        num_nonfinite=None,
        max_abs_diff=line.metrics["gate/logprob_abs_diff/max"],
        mean_abs_diff=line.metrics["gate/logprob_abs_diff/mean"],
        p999_abs_diff=line.metrics["gate/logprob_abs_diff/p999"],
        worst=None,
        faults=(),
        recorded=tuple(violation for violation in line.violations if violation.startswith(GATE)),
    )
