"""One flipped bit of a live value is found at exactly its probe, name, element and distance."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.contracts import Flip
from engines.faults import FLIP_PROBES
from engines.provenance.diff import compare_ledgers
from engines.provenance.ledger import read_ledger, verify_ledger
from engines.provenance.verdict import Verdict
from tests.flows.conftest import Runner

pytestmark = pytest.mark.slow

HIGH_BIT = {"weights": 22, "optimizer": 22, "grads": 22}


def test_two_legs_without_a_flip_are_identical(runner: Runner, reference: Path) -> None:
    again = compare_ledgers(reference, runner.run(steps=3), verify=True)
    assert again.verdict is Verdict.IDENTICAL
    assert again.common_steps == 3
    assert again.compared.tensors > 300


@pytest.mark.parametrize("probe", FLIP_PROBES)
def test_a_flip_is_located_at_its_probe(runner: Runner, reference: Path, probe: str) -> None:
    flip = Flip(step=2, probe=probe, element=0, bit=0)
    found = compare_ledgers(reference, runner.run(steps=2, flip=flip))
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert (found.first.step, found.first.probe) == (2, probe)
    assert found.first.name is not None
    assert found.first.element is not None, found.first.detail
    assert set(found.first.element) == {0}
    assert found.first.value_a != found.first.value_b
    assert found.first.num_differing == 1
    if probe != "tokens":
        assert found.first.ulp == 1


def test_a_high_bit_in_the_gradient_changes_the_weights_downstream(
    runner: Runner, reference: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    flip = Flip(step=2, probe="grads", name=name, element=17, bit=29)
    folder = runner.run("plan.gates.stop_on_red=false", steps=2, flip=flip)
    found = compare_ledgers(reference, folder)
    assert found.first is not None
    assert (found.first.probe, found.first.name, found.first.element) == ("grads", name, (0, 17))
    ours, theirs = read_ledger(folder).lines[2], read_ledger(reference).lines[2]
    for probe in ("grads", "grad_norm", "optimizer", "weights", "sent", "received"):
        assert ours.roots[probe] != theirs.roots[probe]


def test_a_flipped_ledger_still_verifies_because_the_live_value_was_flipped(
    runner: Runner,
) -> None:
    folder = runner.run(steps=2, flip=Flip(step=2, probe="rewards"))
    verify_ledger(folder)


@pytest.mark.parametrize("probe", ["tokens", "rollout_logprobs", "train_logprobs"])
def test_a_flip_on_one_side_makes_the_gate_red(runner: Runner, probe: str) -> None:
    folder = runner.run(steps=2, flip=Flip(step=2, probe=probe))
    assert any(line.startswith("gate: step 2") for line in read_ledger(folder).lines[-1].violations)


def test_a_weight_that_differs_on_one_side_makes_the_gate_red(runner: Runner) -> None:
    """One element of one stored weight, by enough to show in bfloat16, from step 1's push on."""
    name = "model.layers.0.mlp.down_proj.weight"
    flip = Flip(step=1, probe="received", name=name, element=3, bit=13)
    folder = runner.run("plan.gates.stop_on_red=false", steps=2, flip=flip)
    lines = read_ledger(folder).lines
    assert any(text.startswith("sent != received") for text in lines[1].violations)
    assert name in lines[1].violations[0]
    assert any(text.startswith("gate: step 2") for text in lines[2].violations)


def test_a_red_gate_ends_the_segment(runner: Runner) -> None:
    folder = runner.run(steps=3, flip=Flip(step=1, probe="rollout_logprobs"))
    assert read_ledger(folder).last_step == 1
