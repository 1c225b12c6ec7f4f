"""Each gate is switched by its own field of the plan, and a red one counts only where required."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.contracts import Sample
from engines.gates.logprobs import LogprobGate, compare_logprobs
from engines.provenance.verdict import Verdict
from model_specs.errors import SpecError
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import recipe
from model_specs.run_spec import RunSpec
from tasks import gates
from tasks.gates import GateRecord

FIELD_OF = {
    "preflight": "preflight",
    "logprobs": "logprobs",
    "layerwise": "layerwise",
    "native control": "controls",
    "stock control": "controls",
}
STOCK = (
    "numerics.policy=stock",
    "plan.gates.logprobs=report",
    "plan.gates.preflight=off",
    "plan.gates.controls=off",
)


def counts(name: str, *settings: str, holds: bool = False) -> bool:
    """Whether a gate of this name decides the verdict of a leg."""
    record = GateRecord(
        verdict=Verdict.MISALIGNED, holds=holds, weight=Verdict.MISALIGNED, summary=""
    )
    opened: Any = SimpleNamespace(spec=apply_overrides(recipe(), settings), gate=LogprobGate())
    return gates._required(opened, name, record)


@pytest.mark.parametrize("name", FIELD_OF)
def test_a_gate_follows_its_own_field_and_no_other(name: str) -> None:
    assert counts(name)
    assert not counts(name, holds=True)
    assert not counts(name, f"plan.gates.{FIELD_OF[name]}=optional")
    others = sorted(set(FIELD_OF.values()) - {FIELD_OF[name]})
    assert counts(name, *(f"plan.gates.{field}=optional" for field in others))


def test_a_gate_that_has_no_field_always_counts() -> None:
    everything = [f"plan.gates.{field}=optional" for field in set(FIELD_OF.values())]
    assert counts("exported weights", *everything)


DIFFERS = {"1/p0/0": (-1.0,)}
NO_NUMBER = {"1/p0/0": (math.nan,)}
EQUAL = {"1/p0/0": (-0.5,)}


@pytest.mark.parametrize(
    ("setting", "scores", "verdict", "on_report"),
    [
        ("required", EQUAL, Verdict.ALIGNED, False),
        ("required", DIFFERS, Verdict.MISALIGNED, False),
        ("optional", EQUAL, Verdict.ALIGNED, False),
        ("optional", DIFFERS, Verdict.VACUOUS, True),
        ("optional", NO_NUMBER, Verdict.MISALIGNED, False),
        ("report", EQUAL, Verdict.VACUOUS, True),
        ("report", DIFFERS, Verdict.VACUOUS, True),
        ("report", {}, Verdict.MISALIGNED, False),
        ("report", NO_NUMBER, Verdict.MISALIGNED, False),
        ("off", EQUAL, Verdict.VACUOUS, True),
        ("off", DIFFERS, Verdict.VACUOUS, True),
        ("off", {}, Verdict.MISALIGNED, False),
    ],
)
def test_a_leg_is_aligned_only_where_its_log_probs_were_judged_equal(
    setting: str,
    scores: dict[str, tuple[float, ...]],
    verdict: Verdict,
    on_report: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "read_lock", lambda folder: ())
    drawn = Sample(
        request_id="1/p0/0", prompt_id="p0", sample_index=0, prompt_token_ids=(1,),
        token_ids=(7,), logprobs=(-0.5,), text="", finish_reason="length",
    )  # fmt: skip
    opened: Any = SimpleNamespace(
        spec=apply_overrides(recipe(), (f"plan.gates.logprobs={setting}",)), gate=LogprobGate(),
        gates={}, unequal_pushes=[], folder=tmp_path, leg="a", processes={},
        groups_with_variance=1, max_grad_norm=0.5, changed_weights=3,
    )  # fmt: skip
    opened.gate.add(compare_logprobs(1, [drawn], scores))
    gates._judge_window(opened)
    found = gates._end(opened, 1)
    assert (found.verdict, found.on_report) == (verdict, on_report)
    assert ("no alignment is claimed" in found.reason) == on_report
    if scores in ({}, NO_NUMBER):
        assert "step 1: " in found.reason


def test_the_layerwise_gate_is_off_without_asking_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(*settings: str) -> Any:
        spec: RunSpec = apply_overrides(recipe(), settings)
        return SimpleNamespace(spec=spec, gates={}, engines=lambda: 1 / 0)

    monkeypatch.setattr(gates, "session", lambda name: opened("plan.gates.layerwise=off"))
    assert gates.layerwise.fn.__wrapped__("leg") == {}
    monkeypatch.setattr(gates, "session", lambda name: opened("plan.gates.controls=off"))
    with pytest.raises(ZeroDivisionError):
        gates.layerwise.fn.__wrapped__("leg")


def test_stock_numerics_go_with_no_layerwise_gate_and_no_micro_batches() -> None:
    apply_overrides(recipe(), (*STOCK, "plan.gates.layerwise=off"))
    with pytest.raises(SpecError, match=r"plan\.gates\.layerwise=required \(choose off\)"):
        apply_overrides(recipe(), STOCK)
    bound = ("plan.gates.layerwise=off", "trainer_options.max_tokens_per_rank=9216")
    with pytest.raises(SpecError, match=r"max_tokens_per_rank=9216 \(choose None\)"):
        apply_overrides(recipe(), (*STOCK, *bound))


@pytest.mark.parametrize("policy", ["stock", "peer"])
def test_the_short_form_of_a_policy_sets_the_gates_that_it_cannot_hold(policy: str) -> None:
    spec = apply_overrides(recipe(), (f"numerics={policy}",))
    assert spec.numerics.policy == policy
    gates = spec.plan.gates
    assert (gates.logprobs, gates.preflight) == ("report", "optional")
    assert (gates.layerwise, gates.controls) == ("off", "off")
    # Nothing else changes: the same flow, the same ledger.
    numerics = spec.numerics.model_copy(update={"policy": "aligned"})
    plan = spec.plan.model_copy(update={"gates": recipe().plan.gates})
    assert spec.model_copy(update={"numerics": numerics, "plan": plan}) == recipe()


def test_the_short_form_leaves_alone_what_is_allowed_or_set_in_the_same_call() -> None:
    off = ("plan.gates.logprobs=off", "plan.gates.preflight=off")
    recorded = apply_overrides(recipe(), off)
    gates = apply_overrides(recorded, ("numerics=stock",)).plan.gates
    assert (gates.logprobs, gates.preflight) == ("off", "off")
    for overrides in (("numerics=stock", *off), (*off, "numerics=stock")):
        gates = apply_overrides(recipe(), overrides).plan.gates
        assert (gates.logprobs, gates.preflight) == ("off", "off")
    with pytest.raises(SpecError, match=r"controls=required \(choose off\)"):
        apply_overrides(recipe(), ("plan.gates.controls=required", "numerics=stock"))


def test_the_short_form_takes_the_policies_and_a_whole_group_and_nothing_else() -> None:
    assert apply_overrides(recipe(), ("numerics=aligned",)) == recipe()
    whole = apply_overrides(recipe(), ('numerics={"compute_dtype": "float32"}',))
    assert (whole.numerics.policy, whole.numerics.compute_dtype) == ("aligned", "float32")
    with pytest.raises(SpecError, match=r"numerics\.policy='stok': Input should be 'aligned'"):
        apply_overrides(recipe(), ("numerics=stok",))
    with pytest.raises(SpecError, match=r"--set numerics=stock chooses for the gates"):
        apply_overrides(recipe(), ("numerics.policy=stock",))
