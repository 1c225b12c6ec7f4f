"""The stock numerics: unaligned, measured and shown; twins are judged by their comparison."""

from __future__ import annotations

import json

import pytest

from engines.metrics import unknown_metrics
from engines.provenance.ledger import read_ledger
from model_specs.json_text import read_json
from tests.flows.command_line import CommandLine, Ended

pytestmark = pytest.mark.slow

STOCK = (
    "numerics.policy=stock",
    "plan.gates.logprobs=report",
    "plan.gates.preflight=optional",
    "plan.gates.layerwise=off",
    "plan.gates.controls=off",
)
SHORT = ("plan.num_steps=3", "plan.checkpoint_every=2", "loss.tis_clip=2.0")


def flags(*overrides: str) -> list[str]:
    """The overrides as the command line takes them."""
    return [part for override in overrides for part in ("--set", override)]


@pytest.fixture(scope="module")
def stock_twin(lockstep: CommandLine) -> Ended:
    """Two legs under the stock numerics, with truncated importance sampling."""
    return lockstep("run", "tiny_cpu", "--twin", "--run-id", "stock", *flags(*STOCK, *SHORT))


@pytest.mark.exhaustive
def test_a_stock_run_measures_a_mismatch_and_claims_no_alignment(
    lockstep: CommandLine, stock_twin: Ended
) -> None:
    folder = lockstep.runs_dir / "stock"
    verdict = read_json(folder / "verdict.json")
    for leg in "ab":
        facts = verdict["legs"][leg]
        assert facts["on_report"] is True, stock_twin
        assert facts["verdict"] == "Vacuous"
        assert "no alignment is claimed" in facts["reason"]
        assert facts["gates"]["logprobs"]["verdict"] == "Misaligned"
        lines = read_ledger(folder / leg).lines
        assert [line.step for line in lines] == [0, 1, 2, 3]
        for line in lines[1:]:
            assert line.violations == ()
            metrics = line.metrics
            assert unknown_metrics(metrics) == ()
            assert metrics["mismatch/abs_diff/max"] > 0.0
            assert metrics["mismatch/abs_diff/max"] == metrics["gate/logprob_abs_diff/max"]
            assert 0.0 < metrics["mismatch/k3"] < 0.1
            assert metrics["mismatch/tis_weight/mean"] == pytest.approx(1.0, abs=0.1)
            # What was pushed is what is held: in this mode, too.
            assert line.roots["sent"] == line.roots["received"]


@pytest.mark.exhaustive
def test_the_twin_of_a_stock_run_is_judged_by_its_comparison_alone(
    lockstep: CommandLine, stock_twin: Ended
) -> None:
    verdict = read_json(lockstep.runs_dir / "stock" / "verdict.json")
    assert verdict["verdict"] == verdict["comparison"]["verdict"]
    assert verdict["verdict"] in ("Identical", "Diverged")
    assert stock_twin.code == {"Identical": 0, "Diverged": 10}[verdict["verdict"]], stock_twin


@pytest.mark.exhaustive
def test_a_single_stock_run_is_never_called_aligned(lockstep: CommandLine) -> None:
    ended = lockstep(
        *("run", "tiny_cpu", "--run-id", "stock-single", "--json"),
        *flags("numerics=stock", "plan.num_steps=1"),
    )
    assert ended.code == 13, ended
    found = json.loads(ended.stdout)
    assert found["verdict"] == "Vacuous"
    assert "on report" in found["headline"]


def test_what_needs_aligned_engines_is_refused_before_anything_starts(
    lockstep: CommandLine,
) -> None:
    ended = lockstep("run", "tiny_cpu", *flags("numerics.policy=stock"))
    assert ended.code == 2, ended
    assert "plan.gates.logprobs=required (choose report or off)" in ended.stderr
    ended = lockstep("run", "tiny_cpu", *flags(*STOCK, "trainer=megatron"))
    assert ended.code == 14, ended
    assert "stock numerics" in ended.stderr
