"""Parts of pages and messages: which updates stand side by side, and what is not shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.contracts import StepRecord
from engines.provenance.diff import compare_ledgers
from engines.provenance.digest import digest_floats
from engines.provenance.ledger import LedgerHeader, LedgerWriter, read_ledger
from flows.diagnosis import _variables
from model_specs.errors import SpecError
from model_specs.recipes.tiny_cpu import recipe
from tasks.compared_amounts import compared_amounts
from tasks.html_divergence import cell_state, strip_columns
from tasks.night_page import read_nights
from tasks.tracking_store import without_password


def leg_of(folder: Path, *steps: int, weight: float = 1.0) -> Path:
    header = LedgerHeader(
        trajectory="t", plan="p", run_id="r", leg=folder.name, start_step=steps[0]
    )
    ledger = LedgerWriter(folder, header=header)
    for step in steps:
        digests = {"weights": {"w": digest_floats("w", [weight * step])}}
        metrics = {"gate/num_tokens": 10.0 * step}
        ledger.append(
            StepRecord(
                step=step, update=-1 if step == steps[0] else 0, digests=digests, metrics=metrics
            )
        )
    return folder


def test_updates_stand_beside_those_of_the_same_step(tmp_path: Path) -> None:
    parent, fork = leg_of(tmp_path / "a", *range(5)), leg_of(tmp_path / "b", *range(2, 5))
    columns = strip_columns(read_ledger(parent), read_ledger(fork))
    assert [cell_state(column, "weights") for column in columns] == ["equal", "equal"]
    found = compare_ledgers(parent, fork).to_dict()
    updates = found["compared"]["updates"]
    assert compared_amounts(parent, updates=updates, beside=fork).tokens == 30 + 40
    assert compared_amounts(fork, updates=updates, beside=parent).tokens == 30 + 40
    other = leg_of(tmp_path / "c", *range(5), weight=2.0)
    columns = strip_columns(read_ledger(parent), read_ledger(other))
    assert [cell_state(column, "weights") for column in columns] == ["equal", *4 * ["differs"]]


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = "http://user:s3c@ret@host:5000"
    assert without_password(uri) == "http://user:***@host:5000"
    said = f"API request to {uri}/api/2.0/mlflow failed: {uri}"
    assert "s3c" not in without_password(said)
    assert without_password(said).count("user:***@host:5000") == 2
    assert without_password("sqlite:////runs/a@b:c/mlflow.db") == "sqlite:////runs/a@b:c/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert not any("s3c" in finding.fact for finding in _variables())


def test_a_flip_in_a_step_that_never_comes_is_refused_by_every_flow() -> None:
    from flows.dry import check_flip
    from flows.nightly import night_spec
    from flows.run_request import FlipRequest, NightlyRequest

    flip = FlipRequest(step=99, probe="grads")
    with pytest.raises(SpecError, match="step=99: the run has steps 1 to 8"):
        night_spec(NightlyRequest(recipe="tiny_cpu", inject_flip=flip))
    check_flip(recipe(), 8)


def test_a_damaged_verdict_beside_it_does_not_end_a_night(tmp_path: Path) -> None:
    night = {
        "verdict": "Identical",
        "run_id": "n",
        "night": {"ended_at": "2", "recipe": "tiny_cpu"},
    }
    for name, text in (("good", json.dumps(night)), ("torn", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "verdict.json").write_text(text)
    assert [found["run_id"] for found in read_nights(tmp_path)] == ["n"]
