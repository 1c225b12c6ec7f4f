"""Steps of an earlier attempt, read off the ledger, count in the gate as they did then."""

from __future__ import annotations

import math
from typing import Any

from engines.gates.earlier_steps import EarlierSteps, earlier_steps
from engines.gates.logprobs import LogprobGate
from engines.provenance.ledger import LedgerLine
from engines.provenance.verdict import Verdict

RED = "gate: step 2: 3 of 100 log-probs differ, max 0.25; worst: ..."


def line(step: int, **changes: Any) -> LedgerLine:
    """Update 0 of a step with 100 equal tokens and four groups, one of them equal."""
    exact = changes.pop("exact", 1.0)
    return LedgerLine(
        step=step,
        update=0,
        roots={"weights": changes.pop("weights", f"w{step}")},
        counts={"weights": 26},
        chain="c",
        metrics={
            "gate/num_tokens": 100.0,
            "gate/exact_fraction": exact,
            "gate/logprob_abs_diff/max": 0.0 if exact == 1.0 else 0.25,
            "gate/logprob_abs_diff/mean": 0.0,
            "gate/logprob_abs_diff/p999": 0.0,
            "reward/zero_std_groups": changes.pop("equal", 1.0),
            "train/grad_norm": changes.pop("norm", 0.5),
        },
        **changes,
    )


FIRST = LedgerLine(
    step=0, update=-1, roots={"weights": "w0"}, counts={"weights": 26}, chain="c", metrics={}
)


def recalled(*lines: LedgerLine, last_step: int = 2, trained: int = 4) -> EarlierSteps:
    return earlier_steps((FIRST, *lines), last_step=last_step, drawn=4, trained=trained)


def verdict(found: EarlierSteps) -> Verdict:
    gate = LogprobGate()
    for step in found.gates:
        gate.add(step)
    return gate.final(
        groups_with_variance=found.groups_with_variance,
        max_grad_norm=found.max_grad_norm,
        changed_weights=found.changed_weights,
    ).verdict


def test_green_steps_are_counted_and_later_ones_are_not() -> None:
    found = recalled(line(1), line(2), line(3, exact=0.5))
    assert [step.num_tokens for step in found.gates] == [100, 100]
    assert [step.aligned for step in found.gates] == [True, True]
    assert (found.groups_with_variance, found.max_grad_norm) == (6, 0.5)
    assert found.changed_weights == 52
    assert verdict(found) is Verdict.ALIGNED


def test_a_red_step_stays_red_with_the_words_that_the_ledger_has() -> None:
    found = recalled(line(1), line(2, exact=0.97, violations=(RED,)))
    assert found.gates[1].violations() == (RED,)
    assert not found.gates[1].aligned
    assert verdict(found) is Verdict.MISALIGNED


def test_a_step_that_was_on_report_is_red_once_the_gate_is_required() -> None:
    (step,) = recalled(line(1, exact=0.97)).gates
    assert step.violations(on_report=True) == ()
    assert step.violations() == ("gate: step 1: 3 of 100 log-probs differ, max 0.25",)


def test_a_push_that_did_not_arrive_is_not_of_the_gate() -> None:
    words = "sent != received: version 1, tensor a: sent 1, received 2"
    found = recalled(line(1, violations=(words, RED)))
    assert found.unequal_pushes == (words,)
    assert found.gates[0].recorded == (RED,)


def test_what_was_at_stake_is_as_it_was() -> None:
    assert recalled(line(1, weights="w0")).changed_weights == 0
    assert recalled(line(1, equal=4.0)).groups_with_variance == 0
    assert recalled(line(1), trained=2).groups_with_variance == 2
    assert math.isnan(recalled(line(1, norm=math.nan), line(2)).max_grad_norm)
    nothing = recalled()
    assert (nothing.gates, nothing.max_grad_norm, nothing.changed_weights) == ((), 0.0, 0)
