"""Legs that should be equal are one search away, and their comparison is a run in MLflow.

Synthetic legs; a real SQLite store and a real server over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import runs
from engines.provenance.ledger import read_ledger
from engines.provenance.verdict import Verdict
from engines.runs import write_json
from flows.run_request import CompareRequest
from model_specs.errors import LockstepError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.registry import load_recipe
from tasks import comparison
from tasks.report import publish
from tasks.sides import compare_sides, open_sides
from tasks.tracking import find_runs, sync
from tests.flows.command_line import CommandLine, Ended
from tests.flows.mlflow_server import free_port, mlflow_server
from tests.unit.provenance.test_diff import Change, flip_tensor, write_leg

TRAJECTORY = trajectory_fingerprint(load_recipe("tiny_cpu"))
FACTS = {"trainer": {"cpu": {"machine": "x86_64"}, "code_digest": "c0de"}}


def write_run(
    runs_dir: Path, name: str, *, change: Change | None = None, keep: bool = True
) -> Path:
    """A run with one leg of three steps."""
    folder = runs_dir / name
    write_json(folder / "run.json", {"schema_version": 1, "run_id": name, "attempt": 1})
    runs.write_spec(folder, load_recipe("tiny_cpu"))
    leg = write_leg(folder / "a", trajectory=TRAJECTORY, change=change)
    write_json(leg / "environment.json", FACTS)
    for step in range(1, 4):
        with (leg / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "metrics": {"reward/mean": step / 10}}) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that should be equal; one parts from the others at step 2."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        write_run(folder, name)
    write_run(folder, "three", change=flip_tensor("grads", "layers.2.w", 3, 5))
    return folder


@pytest.fixture(scope="module", params=["SQLite", "HTTP"])
def uri(
    request: pytest.FixtureRequest, runs_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A store with the three runs; named to the code as a user does, by the environment."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "SQLite":
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            uri = f"sqlite:///{runs_dir / 'mlflow.db'}"
            _send(runs_dir, uri)
            yield uri
            return
        port = free_port()
        uri = f"http://127.0.0.1:{port}"
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        with mlflow_server(tmp_path_factory.mktemp("server"), port):
            _send(runs_dir, uri)
            yield uri


def _send(runs_dir: Path, uri: str) -> None:
    for name in ("one", "two", "three"):
        assert sync(runs_dir / name, tracking_uri=uri, experiment="tiny").problems == ()


def leg_ids(uri: str) -> dict[str, str]:
    """Run -> MLflow's id of its leg, found by the documented query."""
    tags = {"lockstep.trajectory_fingerprint": TRAJECTORY, "lockstep.device_class": "cpu/x86_64"}
    found = find_runs(uri, None, {**tags, "lockstep.kind": "leg"})
    return {run.tags["lockstep.run_id"]: run.run_id for run in found}


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    points = MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)
    return sorted((point.step, point.value) for point in points)


def compared(runs_dir: Path, name: str, *sides: str) -> dict[str, Any]:
    """What the flow does, without Prefect."""
    with open_sides(sides, runs_dir) as found:
        pairs = comparison.compare_with_first(found)
        run = runs.new_run(load_recipe("tiny_cpu"), runs_dir, run_id=name)
        outcome = comparison.write_outcome(run, found, pairs)
        publish(run.folder, outcome, found=comparison.shown_legs(pairs))
    details: dict[str, Any] = read_json(run.folder / "verdict.json")
    return details


def test_legs_that_should_be_equal_are_one_search_away(runs_dir: Path, uri: str) -> None:
    assert set(leg_ids(uri)) == {"one", "two", "three"}
    chains = {
        run.tags["lockstep.run_id"]: run.tags["lockstep.chain_digest"]
        for run in find_runs(uri, "tiny", {"lockstep.code_digest": "c0de"})
    }
    assert chains["one"] == chains["two"] != chains["three"]
    tags = {"trajectory_fingerprint": TRAJECTORY}
    names = comparison.legs_with_tags(tags, experiment="tiny", runs_dir=runs_dir)
    assert set(names) == {f"mlflow:{run_id}" for run_id in leg_ids(uri).values()}
    with pytest.raises(SpecError, match=r"0 legs in MLflow carry lockstep\.recipe=other"):
        comparison.legs_with_tags({"recipe": "other"}, experiment=None, runs_dir=runs_dir)


def test_a_comparison_is_a_run_whose_chart_drops_where_the_bits_part(
    runs_dir: Path, uri: str
) -> None:
    from mlflow import MlflowClient

    name = f"parted-{uri[:4]}"
    ids = leg_ids(uri)
    details = compared(runs_dir, name, f"mlflow:{ids['one']}", ids["three"])
    assert details["verdict"] == "Diverged"
    assert details["comparison"]["first"]["element"] == [1, 0]
    sent = [sync(runs_dir / name, tracking_uri=uri, experiment="tiny") for _ in range(2)][1]
    assert sent.problems == ()
    assert sent.run_id is not None
    identical = history(uri, sent.run_id, "repro/identical")
    assert identical == [(1, 1.0), (2, 0.0), (3, 0.0)]
    assert history(uri, sent.run_id, "repro/max_ulp") == [(1, 0.0), (2, 32.0)]
    (found,) = find_runs(uri, "tiny", {"lockstep.kind": "comparison", "lockstep.run_id": name})
    assert found.status == "FAILED"
    assert found.tags["lockstep.verdict"] == "Diverged"
    assert found.tags["lockstep.compared"] == "one/a three/a"
    assert found.tags["lockstep.first_divergence"].startswith("step 2 update 0 grads layers.2.w")
    client = MlflowClient(tracking_uri=uri)
    stored = {item.path for item in client.list_artifacts(sent.run_id)}
    assert {"report.html", "verdict.json", "spec.json", "plots"} <= stored
    plots = {item.path for item in client.list_artifacts(sent.run_id, "plots")}
    assert plots == {"plots/curves.png", "plots/strip.png", "plots/ulp.png"}


def test_equal_legs_are_identical_at_each_step_and_several_are_compared_with_the_first(
    runs_dir: Path, uri: str
) -> None:
    name = f"equal-{uri[:4]}"
    assert compared(runs_dir, name, "one", "two/a")["verdict"] == "Identical"
    sent = sync(runs_dir / name, tracking_uri=uri, experiment="tiny")
    assert sent.run_id is not None
    assert history(uri, sent.run_id, "repro/identical") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert history(uri, sent.run_id, "repro/max_ulp") == [(1, 0.0), (2, 0.0), (3, 0.0)]
    many = compared(runs_dir, f"many-{uri[:4]}", "one", "two", "three")
    assert [pair["verdict"] for pair in many["pairs"]] == ["Identical", "Diverged"]
    assert many["headline"].startswith("1 of 2 legs equal one/a; three/a: first difference at")
    page = (runs_dir / f"many-{uri[:4]}" / "report.html").read_text()
    assert "Each against the first" in page
    text = (runs_dir / f"many-{uri[:4]}" / "report.md").read_text()
    assert "| one/a | two/a | Identical |" in text
    assert r"3.0 (0x40400000) \| 3.0" in text


def test_without_its_folder_a_run_is_compared_by_what_was_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    write_run(tmp_path, "here")
    gone = write_run(tmp_path, "gone", change=flip_tensor("grads", "layers.2.w", 3, 5))
    for folder in (tmp_path / "here", gone):
        sync(folder, tracking_uri=store, experiment="tiny")
    gone.rename(tmp_path / "moved")
    ids = leg_ids(store)
    with open_sides(("here", f"mlflow:{ids['gone']}"), tmp_path) as (a, b):
        assert b.label == "gone/a"
        found = compare_sides(a, b)
        assert b.path.is_dir()
    assert not b.path.exists(), "what was downloaded is deleted"
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert "the name is not known" in str(found.first)
    with (
        pytest.raises(LockstepError, match="has no leg of that id"),
        open_sides(("here", f"mlflow:{'0' * 32}"), tmp_path),
    ):
        pass


def test_sides_are_of_one_kind_and_what_they_are_called(runs_dir: Path) -> None:
    lock = runs_dir / "one" / "a" / "lock.json"
    lock.write_text('{"schema_version": 1, "rows": []}')
    with (
        pytest.raises(SpecError, match=r"lock\.json is a lock, two is a leg: only things of one"),
        open_sides((str(lock), "two"), runs_dir),
    ):
        pass
    with open_sides((str(lock), str(lock)), runs_dir) as (a, b):
        assert compare_sides(a, b).verdict is Verdict.VACUOUS
    with (
        pytest.raises(SpecError, match=r"known runs: .*one"),
        open_sides(("nobody", "two"), runs_dir),
    ):
        pass


def test_a_request_names_legs_or_tags() -> None:
    with pytest.raises(ValueError, match="exactly one of runs and tags"):
        CompareRequest()
    with pytest.raises(ValueError, match="two or more runs"):
        CompareRequest(runs=("one",))
    schema = CompareRequest.model_json_schema()
    assert schema["properties"]["runs"]["minItems"] == 2
    assert schema["oneOf"] == [{"required": ["runs"]}, {"required": ["tags"]}]
    asked = CompareRequest(runs=("a", "b", "c", "d", "e"))
    assert asked.describe() == "a b c and 2 more"
    assert CompareRequest(tags={"recipe": "tiny_cpu"}).describe() == "recipe=tiny_cpu"


@pytest.mark.slow
def test_the_command_compares_runs_that_exist_and_leaves_a_run(
    lockstep: CommandLine, twin: Ended, flipped: Ended
) -> None:
    """The twin and the flipped run have one trajectory, so their common steps are compared."""
    assert (twin.code, flipped.code) == (0, 10)
    ended = lockstep("compare", "twin/a", "twin/b", "flipped/b", "--run-id", "compared", "--json")
    assert ended.code == 10, ended
    details = json.loads(ended.stdout)
    assert [pair["verdict"] for pair in details["pairs"]] == ["Identical", "Diverged"]
    assert details["comparison"]["first"]["step"] == 2
    folder = lockstep.runs_dir / "compared"
    assert {path.name for path in (folder / "plots").iterdir()} >= {"curves.png", "strip.png"}
    uri = f"sqlite:///{lockstep.runs_dir / 'mlflow.db'}"
    (found,) = find_runs(uri, "tiny_cpu", {"lockstep.kind": "comparison"})
    assert found.tags["lockstep.verdict"] == "Diverged"
    assert history(uri, found.run_id, "repro/identical") == [(1, 1.0), (2, 0.0)]
    (parent,) = find_runs(uri, "tiny_cpu", {"lockstep.kind": "run", "lockstep.run_id": "twin"})
    twin_points = history(uri, parent.run_id, "repro/identical")
    assert twin_points == [(step, 1.0) for step in range(1, 9)]
    refused = lockstep("compare", "twin/a")
    assert refused.code == 2
    assert "two or more runs are needed" in refused.stderr


@pytest.mark.slow
def test_a_run_whose_server_was_down_is_whole_in_mlflow_after_one_sync(
    lockstep: CommandLine,
    flipped: Ended,
    tracking_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = lockstep.runs_dir / "flipped"
    assert json.loads(flipped.stdout)["verdict"] == "Diverged", "the verdict needs no server"
    uri = f"http://127.0.0.1:{tracking_port}"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    with mlflow_server(tmp_path, tracking_port):
        for _ in range(2):
            sent = sync(folder, tracking_uri=uri, experiment="tiny_cpu")
            assert sent.problems == ()
        for leg in "ab":
            lines = read_ledger(folder / leg).lines[1:]
            points = history(uri, sent.child_run_ids[leg], "reward/mean")
            assert points == [(line.step, line.metrics["reward/mean"]) for line in lines]
        assert sent.run_id is not None
        assert history(uri, sent.run_id, "repro/identical") == [(1, 1.0), (2, 0.0)]
        assert history(uri, sent.run_id, "repro/max_ulp") == [(1, 0.0), (2, 1.0)]
