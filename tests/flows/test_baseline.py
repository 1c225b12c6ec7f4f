"""Tonight's baseline is found through MLflow's tags: the explicit one, or the last green night.

Against a real SQLite store, and while a server is down; the run folders are synthetic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.contracts import StepRecord
from engines.provenance.digest import digest_floats
from engines.provenance.ledger import LedgerHeader, LedgerWriter
from engines.runs import read_spec
from flows.console import show_sync
from model_specs.errors import ArtifactError, LockstepError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import recipe
from tasks.baseline import (
    explicit_baselines,
    find_baseline,
    set_baseline,
    unset_baseline,
)
from tasks.nights import baseline_row, commit_of_this_code
from tasks.run_folders import unsent_folders
from tasks.tracking import default_tracking_uri, find_runs, sync_quietly, sync_unsent

DEVICE = "cpu/x86_64"


def make_night(
    runs_dir: Path, name: str, verdict: str, *overrides: str, weight: float = 1.0, torch: str = "1"
) -> Path:
    """A run folder of one line, as a night leaves it, sent to MLflow."""
    folder, leg = runs_dir / name, runs_dir / name / "a"
    spec = apply_overrides(recipe(), overrides)
    leg.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"schema_version": 1, "run_id": name, "attempt": 1})
    )
    (folder / "spec.json").write_text(spec.model_dump_json())
    trainer = {"cpu": {"machine": "x86_64"}, "versions": {"torch": torch}}
    (leg / "environment.json").write_text(json.dumps({"trainer": trainer}))
    header = LedgerHeader(
        trajectory=trajectory_fingerprint(spec), plan="p", run_id=name, leg="a", start_step=0
    )
    ledger = LedgerWriter(leg, header=header)
    for step in (0, 1):
        digests = {"weights": {"w": digest_floats("w", [weight * step])}}
        ledger.append(StepRecord(step=step, update=step - 1, digests=digests))
    night = {"device_class": DEVICE, "first_suspect": None, "commit": commit_of_this_code()}
    (folder / "verdict.json").write_text(
        json.dumps({"verdict": verdict, "chain_digest": ledger.chain, "night": night})
    )
    sync_quietly(folder)
    time.sleep(0.01)  # MLflow orders by milliseconds
    return folder


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own for each test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return tmp_path / "runs"


def baseline_of(folder: Path) -> Any:
    return find_baseline(folder, read_spec(folder), device=DEVICE)


@pytest.mark.timeout(120)
def test_the_last_green_night_of_the_same_trajectory_is_the_baseline(runs_dir: Path) -> None:
    first = make_night(runs_dir, "night-1", "Identical")
    alone = baseline_of(first)
    assert (alone.folder, alone.run_id) == (None, None)
    assert alone.note == f"no green night of this trajectory on {DEVICE}"
    assert baseline_row(first).verdict is None

    second = make_night(runs_dir, "night-2", "Identical", torch="2")
    make_night(runs_dir, "night-3", "Diverged", weight=2.0)
    other = make_night(runs_dir, "other", "Identical", "seeds.root=7")
    tonight = make_night(runs_dir, "tonight", "none yet", weight=2.0, torch="3")
    # Red nights and other trajectories are passed over; another library is no reason to.
    assert baseline_of(tonight).folder == second
    found = baseline_row(tonight)
    assert (found.name, str(found.verdict)) == ("tonight = night-2", "Diverged")
    assert str(found.suspects[0]) == "library torch: 2 -> 3 (trainer)"
    assert found.commands == ("lockstep diff night-2/a tonight/a",)
    assert "since" in baseline_of(other).note
    assert "seeds.root: 1234 -> 7" in baseline_of(other).note
    assert find_baseline(tonight, read_spec(tonight), device="cuda/H200").folder is None

    # A night whose folder is gone is passed over, and that is said.
    (second / "a" / "ledger.jsonl").unlink()
    assert baseline_of(tonight).folder == first
    assert "the folders of night-2 are gone" in baseline_of(tonight).note


def edit_spec(folder: Path, change: Callable[[Any], None]) -> None:
    """What spec.json is to a version that has other fields than the one that wrote it."""
    values = json.loads((folder / "spec.json").read_text())
    change(values)
    (folder / "spec.json").write_text(json.dumps(values))


@pytest.mark.timeout(120)
def test_a_night_is_compared_with_one_whose_execution_and_plan_fields_are_gone(
    runs_dir: Path,
) -> None:
    before = make_night(runs_dir, "night-1", "Identical")
    tonight = make_night(runs_dir, "tonight", "none yet")

    def change(values: Any) -> None:
        values["execution"]["retired"] = 3
        values["plan"]["retired"] = True

    edit_spec(before, change)
    with pytest.raises(ArtifactError, match=r"night-1/spec\.json .*execution\.retired: Extra"):
        read_spec(before)
    found = baseline_row(tonight)
    assert (found.name, str(found.verdict)) == ("tonight = night-1", "Identical")
    assert [str(suspect) for suspect in found.suspects] == [
        "execution execution.retired: 3 -> <no such field>",
        "plan plan.retired: True -> <no such field>",
    ]
    assert explicit_baselines(runs_dir) == []


@pytest.mark.timeout(120)
def test_a_night_before_which_a_trajectory_field_went_says_so(runs_dir: Path) -> None:
    before = make_night(runs_dir, "night-1", "Identical", "seeds.root=7")
    tonight = make_night(runs_dir, "tonight", "none yet")

    def change(values: Any) -> None:
        values["optimizer"]["retired"] = 0.5
        values["schema_version"] = 0

    edit_spec(before, change)
    found = baseline_row(tonight)
    assert found.verdict is None
    assert "since night-1 the trajectory has changed" in found.summary
    assert "optimizer.retired: 0.5 -> '<no such field>'; schema_version: 0 -> 1" in found.summary
    assert "seeds.root: 7 -> 1234" in found.summary


@pytest.mark.timeout(120)
def test_an_explicit_baseline_wins_and_says_what_it_undoes(runs_dir: Path) -> None:
    first = make_night(runs_dir, "night-1", "Identical")
    make_night(runs_dir, "night-2", "Identical")
    red = make_night(runs_dir, "night-3", "Diverged", weight=2.0)
    tonight = make_night(runs_dir, "tonight", "none yet")

    (done,) = set_baseline(first, reason=None)
    assert done.startswith("night-1 (Identical) is the baseline of trajectory ")
    assert baseline_of(tonight).folder == first
    assert baseline_of(tonight).is_explicit

    with pytest.raises(SpecError, match=r"night-3 ended Diverged.*--reason"):
        set_baseline(red, reason=None)
    assert baseline_of(tonight).folder == first
    undone, done = set_baseline(red, reason="new kernel, reviewed")
    assert undone.startswith("night-1 is the baseline no more; it was since ")
    assert done.startswith("night-3 (Diverged) is the baseline")
    assert baseline_of(tonight).folder == red
    assert "because: new kernel, reviewed" in baseline_of(tonight).note
    assert [run.tags["lockstep.run_id"] for run in explicit_baselines(runs_dir)] == ["night-3"]

    with pytest.raises(SpecError, match="night-1 is no explicit baseline"):
        unset_baseline(first)
    unset_baseline(red)
    assert baseline_of(tonight).run_id == "night-2"
    assert explicit_baselines(runs_dir) == []

    set_baseline(first, reason=None)
    (first / "a" / "ledger.jsonl").unlink()
    with pytest.raises(LockstepError, match="the baseline night-1 has no ledger"):
        baseline_of(tonight)
    assert str(baseline_row(tonight).verdict) == "Incomparable"


DOWN = "http://127.0.0.1:9"


@pytest.mark.timeout(240)
def test_while_the_store_is_down_the_run_folders_answer(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_night(runs_dir, "night-1", "Identical")
    second = make_night(runs_dir, "night-2", "Identical")
    make_night(runs_dir, "night-3", "Diverged", weight=2.0)
    tonight = make_night(runs_dir, "tonight", "none yet")
    other = make_night(runs_dir, "other", "none yet", "seeds.root=7")
    set_baseline(first, reason="it is right")
    for folder in (tonight, other):
        (folder / "verdict.json").unlink()

    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", DOWN)
        explicit = baseline_row(tonight)
        assert (explicit.name, str(explicit.verdict)) == ("tonight = night-1", "Identical")
        assert "because: it is right, found by its folder since MLflow cannot be read" in (
            explicit.summary
        )
        changed = baseline_row(other)
        assert changed.verdict is None
        assert "MLflow cannot be read, so the run folders alone were searched" in changed.summary
        assert "seeds.root: 1234 -> 7" in changed.summary
    unset_baseline(first)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    found = baseline_row(tonight)
    assert (found.name, str(found.verdict)) == (f"tonight = {second.name}", "Identical")
    assert found.suspects == ()


def test_a_night_is_red_where_neither_store_nor_folders_say_what_to_compare_with(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tonight = make_night(runs_dir, "tonight", "Identical")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", DOWN)
    found = baseline_row(tonight)
    assert str(found.verdict) == "Incomparable"
    assert "the baseline was not found" in found.summary
    assert "has no other night of tiny_cpu" in found.summary


@pytest.mark.timeout(240)
def test_what_the_store_missed_is_sent_before_the_next_night_is_compared(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_night(runs_dir, "night-1", "Identical")
    uri = default_tracking_uri(first)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", DOWN)
        second = make_night(runs_dir, "night-2", "Identical")
    assert unsent_folders(runs_dir) == [second]
    # Without the store's knowledge the folder still is the last green night.
    assert baseline_of(first).run_id == "night-2"
    assert "found by its folder since MLflow does not have it" in baseline_of(first).note

    tonight = make_night(runs_dir, "tonight", "none yet")
    (tonight / "verdict.json").unlink()
    found = baseline_row(tonight)
    assert (found.name, str(found.verdict)) == ("tonight = night-2", "Identical")
    assert "found by its folder" not in found.summary
    nights = find_runs(uri, "tiny_cpu", {"lockstep.verdict": "Identical"})
    assert [run.tags["lockstep.run_id"] for run in nights] == ["night-2", "night-1"]
    assert unsent_folders(runs_dir) == []

    # What was sent is left alone, and a verdict that changed since is sent again.
    with monkeypatch.context() as patch:
        patch.setattr("tasks.tracking.sync", None)
        assert sync_unsent(runs_dir) == ([], [])
    details = json.loads((first / "verdict.json").read_text())
    (first / "verdict.json").write_text(json.dumps({**details, "verdict": "Diverged"}))
    assert sync_unsent(runs_dir) == (["night-1"], [])


@pytest.mark.timeout(120)
def test_a_folder_that_cannot_be_sent_is_named_and_costs_the_others_nothing(
    runs_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", DOWN)
        make_night(runs_dir, "night-1", "Identical")
        broken = make_night(runs_dir, "night-2", "Identical")
        with pytest.raises(LockstepError, match="did not take everything of run night-2"):
            show_sync(None, runs_dir=runs_dir, as_json=False)
    edit_spec(broken, lambda values: values.update(retired=1))
    capsys.readouterr()
    with pytest.raises(LockstepError, match=r"night-2: .* is not a readable RunSpec"):
        show_sync(None, runs_dir=runs_dir, as_json=True)
    assert json.loads(capsys.readouterr().out)["sent"] == ["night-1"]
    assert show_sync("night-1", runs_dir=runs_dir, as_json=False) == 0
    assert capsys.readouterr().out == "sent: night-1\n"


def test_an_explicit_baseline_outlives_its_store(runs_dir: Path) -> None:
    chosen = make_night(runs_dir, "night-1", "Identical")
    set_baseline(chosen, reason="accepted")
    make_night(runs_dir, "night-2", "Identical")
    tonight = make_night(runs_dir, "night-3", "Identical")
    assert baseline_of(tonight).folder == chosen
    (runs_dir / "mlflow.db").unlink()
    for mark in runs_dir.glob("*/mlflow.json"):
        mark.unlink()
    sync_unsent(runs_dir)
    found = baseline_of(tonight)
    assert found.folder == chosen
    assert "because: accepted" in found.note


def test_a_red_night_that_was_resumed_to_green_is_no_baseline(runs_dir: Path) -> None:
    green = make_night(runs_dir, "night-1", "Identical")
    red = make_night(runs_dir, "night-2", "Diverged", weight=2.0)
    tonight = make_night(runs_dir, "night-3", "Identical")
    # As `resume` leaves it: the legs agree, and nothing was compared with the night before.
    (red / "verdict.json").write_text(json.dumps({"verdict": "Identical", "chain_digest": "c"}))
    sync_quietly(red)
    assert baseline_of(tonight).folder == green


def test_the_commit_of_a_night_is_that_it_ran_at(runs_dir: Path) -> None:
    night = make_night(runs_dir, "night-1", "Identical")
    verdict = json.loads((night / "verdict.json").read_text())
    verdict["night"]["commit"] = "0123abc"
    (night / "verdict.json").write_text(json.dumps(verdict))
    assert baseline_of(make_night(runs_dir, "night-2", "Identical")).commit == "0123abc"
