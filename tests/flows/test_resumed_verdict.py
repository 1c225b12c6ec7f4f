"""What a resumed run ends with: all steps of the leg, and the comparison with the run's others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engines import runs
from engines.contracts import Flip, StepRecord
from engines.gates.logprobs import LogprobGate
from engines.provenance.diff import Comparison
from engines.provenance.digest import digest_floats
from engines.provenance.ledger import LedgerHeader, LedgerWriter, read_ledger
from engines.provenance.verdict import Verdict
from flows import train as train_flow
from flows.legs import RESULT
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.recipes.tiny_cpu import recipe
from model_specs.run_spec import RunSpec
from tasks import compare, gates, train
from tasks.compare import LegResult
from tests.flows.conftest import Runner

Concluded = tuple[tuple[LegResult, ...], Comparison | None, Mapping[str, Any]]
"""What a flow was ended with: legs, comparison, and what stands beside them."""


def result_of(folder: Path, leg: str) -> LegResult:
    """An Aligned leg with the chain of its ledger."""
    chain = read_ledger(folder / leg).chain
    aligned = LegResult.failed(leg, "equal", verdict=Verdict.ALIGNED, last_step=2)
    return dataclasses.replace(aligned, chain_digest=chain)


def write_leg(folder: Path, spec: RunSpec, leg: str, *, weight: float, ended: bool = True) -> None:
    """A leg of two steps whose weights at step k are k times `weight`."""
    header = LedgerHeader(
        trajectory=trajectory_fingerprint(spec), plan="p", run_id=folder.name, leg=leg
    )
    ledger = LedgerWriter(folder / leg, header=header)
    for step in range(3):
        digests = {"weights": {"w": digest_floats("w", [weight * step])}}
        ledger.append(StepRecord(step=step, update=-1 if step == 0 else 0, digests=digests))
    if ended:
        values = dataclasses.asdict(result_of(folder, leg))
        runs.write_json(folder / leg / RESULT, values)


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Concluded]:
    """Resumes leg a of a run with these legs, without engines: its steps give the same bits."""

    def go_on(**legs: Mapping[str, Any]) -> Concluded:
        spec = recipe()
        folder = runs.new_run(spec, tmp_path, run_id="run").folder
        for leg, made in legs.items():
            write_leg(folder, spec, leg, **made)
        found: list[Concluded] = []

        def conclude(run: runs.Run, legs: Any, comparison: Any = None, *, more: Any) -> None:
            found.append((tuple(legs), comparison, more))

        monkeypatch.setattr(train_flow, "conclude", conclude)
        monkeypatch.setattr(train_flow, "resumption", lambda *_, **__: (folder, spec, 1))
        # A task outside of a flow would start a Prefect server.
        monkeypatch.setattr(compare, "compare_folders", compare.compare_folders.fn)
        monkeypatch.setattr(
            train_flow, "run_leg", lambda spec, run, leg, resume_step: result_of(run.folder, leg)
        )
        train_flow.go_on("run", None, (), leg="a", runs_dir=str(tmp_path))
        return found[0]

    return go_on


def test_a_resume_that_is_cut_off_leaves_no_verdict_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = recipe()
    folder = runs.new_run(spec, tmp_path, run_id="run").folder
    write_leg(folder, spec, "a", weight=1.0)
    for name in ("verdict.json", "report.html", "report.md"):
        (folder / name).write_text('{"verdict": "Aligned"}')

    def cut_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_flow, "resumption", lambda *_, **__: (folder, spec, 1))
    monkeypatch.setattr(train_flow, "run_leg", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_flow.go_on("run", None, (), leg="a", runs_dir=str(tmp_path))
    assert {path.name for path in folder.iterdir()} & {"verdict.json", "report.html"} == set()


def test_a_run_of_one_leg_ends_with_it(resumed: Callable[..., Concluded]) -> None:
    legs, comparison, more = resumed(a={"weight": 1.0})
    assert [leg.leg for leg in legs] == ["a"]
    assert comparison is None
    assert more == {"resumed": {"leg": "a", "step": 1}}


def test_a_twin_is_compared_again(resumed: Callable[..., Concluded]) -> None:
    legs, comparison, _ = resumed(a={"weight": 1.0}, b={"weight": 1.0})
    assert [leg.leg for leg in legs] == ["a", "b"]
    assert comparison is not None
    assert comparison.verdict is Verdict.IDENTICAL


def test_a_diverged_twin_stays_diverged(resumed: Callable[..., Concluded]) -> None:
    _, comparison, _ = resumed(a={"weight": 1.0}, b={"weight": 2.0})
    assert comparison is not None
    assert comparison.verdict is Verdict.DIVERGED
    assert comparison.first is not None
    assert comparison.first.step == 1


def test_one_diverged_leg_of_several_decides(resumed: Callable[..., Concluded]) -> None:
    legs = {"a": {"weight": 1.0}, "b": {"weight": 2.0}, "resume": {"weight": 1.0}}
    _, comparison, _ = resumed(**legs)
    assert comparison is not None
    assert comparison.verdict is Verdict.DIVERGED


def test_a_leg_that_was_cut_off_is_named(resumed: Callable[..., Concluded]) -> None:
    legs, comparison, more = resumed(a={"weight": 1.0}, b={"weight": 1.0, "ended": False})
    assert [leg.leg for leg in legs] == ["a"]
    assert comparison is None
    assert more["about"] == (
        "leg a by itself, since leg b has not ended (lockstep resume run --leg b)"
    )


@pytest.mark.slow
def test_a_leg_that_goes_on_is_judged_by_its_earlier_steps_too(runner: Runner) -> None:
    flip = Flip(step=1, probe="rollout_logprobs")
    with runner.leg("plan.gates.stop_on_red=false", flip=flip) as opened:
        train.train_segment.fn(opened.name, runner.weights, start_step=0, to_step=2)
        whole = gates.judge(opened.name, last_step=2)
        assert whole.verdict is Verdict.MISALIGNED
        opened.gate, opened.gates = LogprobGate(), {}
        opened.groups_with_variance, opened.changed_weights = 0, 0
        train.recall_steps(opened.name, 2)
        recalled = gates.judge(opened.name, last_step=2)
    assert (recalled.verdict, recalled.reason) == (whole.verdict, whole.reason)
    found, wanted = (leg.gates["logprobs"]["figures"] for leg in (recalled, whole))
    for name in ("num_tokens", "num_exact", "max_abs_diff", "groups_with_variance", "num_steps"):
        assert found[name] == wanted[name], name
    assert found["max_grad_norm"] == wanted["max_grad_norm"] > 0.0
    assert found["changed_weights"] > 0


@pytest.mark.slow
def test_a_line_that_a_killed_driver_has_torn_is_dropped(runner: Runner) -> None:
    with runner.leg() as opened:
        train.train_segment.fn(opened.name, runner.weights, start_step=0, to_step=2)
        ledger = train.open_ledger(opened)
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = opened.folder / name
            path.write_bytes(path.read_bytes()[:-20])
        train.forget_after(opened, ledger, 1)
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = (opened.folder / name).read_text(encoding="utf-8").splitlines()
            assert {json.loads(row)["step"] for row in rows} == {1}
