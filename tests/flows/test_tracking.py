"""MLflow holds each step of a run folder exactly once, whatever happened on the way there.

Against a real SQLite store and a real server over HTTP; the run folders are synthetic.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from model_specs.errors import LockstepError
from model_specs.recipes.tiny_cpu import recipe
from tasks import tracking
from tasks.samples_table import COLUMNS, newest_samples
from tasks.tracking import TrackedRun, find_runs, sync, sync_quietly
from tests.flows.mlflow_server import free_port, mlflow_server

ROOT = Path(__file__).resolve().parents[2]
METRICS = ("reward/mean", "train/grad_norm", "gate/logprob_abs_diff/max", "perf/step_s")


def make_run(root: Path, run_id: str, *, legs: tuple[str, ...] = ("a",), steps: int = 5) -> Path:
    run_dir = root / run_id
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_id, "attempt": 1}))
    (run_dir / "spec.json").write_text(recipe().model_dump_json())
    for leg in legs:
        (run_dir / leg).mkdir()
        (run_dir / leg / "lock.json").write_text('{"rows": []}')
        (run_dir / leg / "gates.json").write_text("{}")
        (run_dir / leg / "environment.json").write_text(
            json.dumps({"trainer": {"torch": "2.13.0", "ambient": {"host": f"host-{leg}"}}})
        )
        (run_dir / leg / "ledger.jsonl").write_text('{"schema_version": 1}\n')
        append_steps(run_dir / leg, range(1, steps + 1))
    return run_dir


def append_steps(leg: Path, steps: range) -> None:
    for step in steps:
        values = (step / 10, step / 7, 0.0, 1.5)
        row = {"step": step, "metrics": dict(zip(METRICS, values, strict=True))}
        append(leg / "metrics.jsonl", row)
        append(leg / "ledger.jsonl", {"step": step, "chain": f"chain-{step}"})
        append(leg / "samples.jsonl", sample(step, 0))
        append(leg / "samples.jsonl", sample(step, 1))


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def sample(step: int, index: int) -> dict[str, Any]:
    return {
        "step": step,
        "request_id": f"{step}/train-0/{index}",
        "prompt_id": "train-0",
        "prompt": "12 + 30 =\n",
        "completion": 'it is "42"',
        "label": "42",
        "reward": 0.1 + 0.2,
        "advantage": -1 / 3,
        "length": 3,
        "finish_reason": "stop",
        "worst_logprob_diff": 0.0 if index else math.nan,
    }


def write_verdict(run_dir: Path, verdict: str, *, differs_at: int | None = None) -> None:
    """Write what a flow concludes; a difference is one of 7 ULP in a gradient."""
    first = {"step": differs_at, "probe": "grads", "max_ulp": 7} if differs_at else None
    record = {
        "verdict": verdict,
        "first_divergence": f"step {differs_at} update 0 grads" if differs_at else None,
        "chain_digest": "9f3a",
        "comparison": {"verdict": verdict, "common_steps": 3, "first": first},
    }
    (run_dir / "verdict.json").write_text(json.dumps(record))


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(tracked: TrackedRun, leg: str, metric: str) -> list[tuple[int, float]]:
    points = client_of(tracked.uri).get_metric_history(tracked.child_run_ids[leg], metric)
    return sorted((point.step, point.value) for point in points)


def steps_of(tracked: TrackedRun, leg: str = "a") -> dict[str, list[int]]:
    return {name: [step for step, _ in history(tracked, leg, name)] for name in METRICS}


def each_once(last: int) -> dict[str, list[int]]:
    return {name: list(range(1, last + 1)) for name in METRICS}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite store for all tests; each test has its own run id."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def test_importing_tracking_does_not_import_mlflow() -> None:
    code = (
        "import sys, tasks.tracking; sys.exit('mlflow' in sys.modules or 'prefect' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_second_sync_adds_nothing(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "twice", steps=5)
    first = sync(run_dir, tracking_uri=uri, experiment="e")
    second = sync(run_dir, tracking_uri=uri, experiment="e")
    assert first == second
    assert first.problems == ()
    assert steps_of(second) == each_once(5)
    assert history(second, "a", "reward/mean") == [(step, step / 10) for step in range(1, 6)]


def test_a_later_sync_sends_only_the_rest(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    run_dir = make_run(tmp_path, "rest", steps=3)
    sync(run_dir, tracking_uri=uri, experiment="e")
    append_steps(run_dir / "a", range(4, 6))
    sent: list[int] = []
    real = MlflowClient.log_batch

    def watched(self: Any, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        sent.extend(metric.step for metric in metrics)
        return real(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", watched)
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert sorted(set(sent)) == [4, 5]
    assert steps_of(tracked) == each_once(5)


def test_an_evaluation_that_came_after_its_step_was_sent_arrives_once(
    tmp_path: Path, uri: str
) -> None:
    run_dir = make_run(tmp_path, "evaluated-late", steps=3)
    sync(run_dir, tracking_uri=uri, experiment="e")
    append(run_dir / "a" / "metrics.jsonl", {"step": 3, "metrics": {"eval/held/accuracy": 0.5}})
    for _ in range(2):
        tracked = sync(run_dir, tracking_uri=uri, experiment="e")
        assert history(tracked, "a", "eval/held/accuracy") == [(3, 0.5)]
        assert history(tracked, "a", "reward/mean") == [(step, step / 10) for step in (1, 2, 3)]
    append_steps(run_dir / "a", range(4, 5))
    assert steps_of(sync(run_dir, tracking_uri=uri, experiment="e"))["reward/mean"] == [1, 2, 3, 4]


def break_log_batch(monkeypatch: pytest.MonkeyPatch, *, share: float, with_tags: bool) -> None:
    """Let the first batch of metrics arrive only in part, at another time, and then fail."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    real = MlflowClient.log_batch

    def broken(self: Any, run_id: str, metrics: Any = (), tags: Any = (), **rest: Any) -> Any:
        if not metrics:
            return real(self, run_id, metrics=metrics, tags=tags, **rest)
        # Another timestamp, so that no store can drop a repeated row as equal.
        arrived = [
            Metric(metric.key, metric.value, metric.timestamp + 1, metric.step)
            for metric in metrics[: round(len(metrics) * share)]
        ]
        real(self, run_id, metrics=arrived, tags=tags if with_tags else ())
        raise ConnectionError("the answer was lost")

    monkeypatch.setattr(MlflowClient, "log_batch", broken)


@pytest.mark.parametrize(
    ("share", "with_tags"), [(0.0, False), (0.5, False), (1.0, False), (1.0, True)]
)
def test_a_crash_around_a_batch_leaves_each_step_once(
    tmp_path: Path, uri: str, share: float, with_tags: bool
) -> None:
    run_dir = make_run(tmp_path, f"crash-{share}-{with_tags}", steps=4)
    with pytest.MonkeyPatch.context() as patch:
        break_log_batch(patch, share=share, with_tags=with_tags)
        broken = sync(run_dir, tracking_uri=uri, experiment="e")
    assert "the answer was lost" in broken.problems[0]
    append_steps(run_dir / "a", range(5, 6))
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert tracked.run_id == broken.run_id
    assert tracked.problems == ()
    assert steps_of(tracked) == each_once(5)


def test_without_the_mark_of_an_unfinished_sync_a_crash_would_leave_duplicates(
    tmp_path: Path, uri: str
) -> None:
    """The control of the test above: the mark is what makes the next sync look."""
    run_dir = make_run(tmp_path, "no-mark", steps=4)
    with pytest.MonkeyPatch.context() as patch:
        break_log_batch(patch, share=1.0, with_tags=False)
        broken = sync(run_dir, tracking_uri=uri, experiment="e")
    client_of(uri).delete_tag(broken.child_run_ids["a"], tracking.SENDING_TAG)
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert steps_of(tracked)["reward/mean"] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_more_values_than_a_batch_holds_arrive_once(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "long", steps=0)
    with (run_dir / "a" / "metrics.jsonl").open("w") as file:
        for step in range(1, 701):
            metrics = {"reward/mean": step / 2, "train/lr": 1e-6, "train/kl": 0.0}
            file.write(json.dumps({"step": step, "metrics": metrics}) + "\n")
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert tracked.problems == ()
    expected = [(step, step / 2) for step in range(1, 701)]
    assert history(tracked, "a", "reward/mean") == expected


def test_nan_is_recorded_and_infinities_are_clamped_by_the_store(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "nan", steps=0)
    append(run_dir / "a" / "metrics.jsonl", {"step": 1, "metrics": {"x": "nan", "y": "-inf"}})
    append(run_dir / "a" / "metrics.jsonl", {"step": 2, "metrics": {"x": math.nan, "y": math.inf}})
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert [math.isnan(value) for _, value in history(tracked, "a", "x")] == [True, True]
    limit = sys.float_info.max
    assert history(tracked, "a", "y") == [(1, -limit), (2, limit)]


def test_two_legs_are_children_of_one_parent_and_carry_tags(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "legs", legs=("a", "b"), steps=3)
    first = sync(run_dir, tracking_uri=uri, experiment="tags")
    assert client_of(uri).get_run(first.run_id).info.status == "RUNNING"
    write_verdict(run_dir, "Diverged", differs_at=2)
    tracked = sync(
        run_dir, tracking_uri=uri, experiment="tags", extra_tags={"prefect.flow_run_id": "f-1"}
    )
    assert set(tracked.child_run_ids) == {"a", "b"}
    runs = {run.run_id: run for run in find_runs(uri, "tags", {"lockstep.run_id": "legs"})}
    assert len(runs) == 3
    parent = runs[str(tracked.run_id)]
    assert parent.tags["lockstep.verdict"] == "Diverged"
    assert parent.tags["lockstep.first_divergence"] == "step 2 update 0 grads"
    assert parent.tags["lockstep.chain_digest"] == "9f3a"
    assert parent.tags["prefect.flow_run_id"] == "f-1"
    assert parent.status == "FAILED"
    assert parent.metrics == {"repro/identical": 0.0, "repro/max_ulp": 7.0}
    points = client_of(uri).get_metric_history(tracked.run_id, "repro/identical")
    assert sorted((point.step, point.value) for point in points) == [(1, 1.0), (2, 0.0), (3, 0.0)]
    sizes = client_of(uri).get_metric_history(tracked.run_id, "repro/max_ulp")
    assert sorted((point.step, point.value) for point in sizes) == [(1, 0.0), (2, 7.0)]
    assert parent.params["optimizer.lr"] == str(recipe().optimizer.lr)
    for leg, run_id in tracked.child_run_ids.items():
        child = runs[run_id]
        assert child.tags["mlflow.parentRunId"] == tracked.run_id
        assert child.tags["lockstep.leg"] == leg
        assert child.tags["lockstep.chain_digest"] == "chain-3"
        assert child.status == "FINISHED"
    environments = {
        runs[run_id].tags["lockstep.environment_fingerprint"]
        for run_id in tracked.child_run_ids.values()
    }
    assert len(environments) == 1, "only the ambient host differs between the legs"


def test_a_verdict_is_counted_once_however_often_it_is_sent(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "verdict", steps=3)
    for second in (1, 2):
        write_verdict(run_dir, "Identical")
        os.utime(run_dir / "verdict.json", (second, second))
        tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    points = client_of(uri).get_metric_history(tracked.run_id, "repro/identical")
    assert sorted((point.step, point.value) for point in points) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    (found,) = find_runs(uri, "e", {"lockstep.run_id": "verdict", "lockstep.kind": "run"})
    assert (found.status, found.tags["lockstep.first_divergence"]) == ("FINISHED", "none")


def test_a_run_that_is_taken_up_again_is_running_again(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "again", steps=2)
    write_verdict(run_dir, "EngineFailure")
    failed = sync(run_dir, tracking_uri=uri, experiment="e")
    statuses = {run.status for run in find_runs(uri, "e", {"lockstep.run_id": "again"})}
    assert statuses == {"FAILED"}
    (run_dir / "verdict.json").unlink()
    append_steps(run_dir / "a", range(3, 5))
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert tracked.run_id == failed.run_id
    assert client_of(uri).get_run(tracked.run_id).info.status == "RUNNING"
    assert steps_of(tracked) == each_once(4)


def test_an_extended_plan_is_shown_and_does_not_stop_the_sync(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "extended", steps=2)
    sync(run_dir, tracking_uri=uri, experiment="e")
    spec = recipe()
    longer = spec.model_copy(update={"plan": spec.plan.model_copy(update={"num_steps": 99})})
    (run_dir / "spec.json").write_text(longer.model_dump_json())
    append_steps(run_dir / "a", range(3, 4))
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    run = client_of(uri).get_run(tracked.run_id)
    assert run.data.params["plan.num_steps"] == str(spec.plan.num_steps)
    assert run.data.tags["lockstep.changed.plan.num_steps"] == "99"
    assert steps_of(tracked) == each_once(3)


def test_the_samples_table_reads_back_as_its_rows(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    run_dir = make_run(tmp_path, "samples", steps=2)
    tracked = sync(run_dir, tracking_uri=uri, experiment="samples")
    append_steps(run_dir / "a", range(2, 4))  # step 2 again, as after a resume
    tracked = sync(run_dir, tracking_uri=uri, experiment="samples")
    client = client_of(uri)
    child = tracked.child_run_ids["a"]
    path = Path(client.download_artifacts(child, "samples.json", str(tmp_path)))
    table = json.loads(path.read_text())
    rows = [sample(step, index) for step in (1, 2, 3) for index in (0, 1)]
    expected = [
        {**row, "worst_logprob_diff": "nan"} if i % 2 == 0 else row for i, row in enumerate(rows)
    ]
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == expected

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    experiment = client.get_experiment_by_name("samples").experiment_id
    frame = client.load_table(experiment, "samples.json", run_ids=[child])
    assert list(frame.columns) == list(COLUMNS)
    assert list(frame["prompt"]) == ["12 + 30 =\n"] * 6
    assert mlflow.get_tracking_uri() == uri


def test_an_artifact_is_uploaded_again_only_when_it_changed(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    uploads: list[str] = []
    real = MlflowClient.log_artifact

    def watched(self: Any, run_id: str, local_path: str, *rest: Any) -> Any:
        uploads.append(Path(local_path).name)
        return real(self, run_id, local_path, *rest)

    monkeypatch.setattr(MlflowClient, "log_artifact", watched)
    run_dir = make_run(tmp_path, "artifacts", steps=1)
    sync(run_dir, tracking_uri=uri, experiment="e")
    everything = {"spec.json", "lock.json", "ledger.jsonl", "environment.json", "gates.json"}
    assert everything <= set(uploads)
    uploads.clear()
    sync(run_dir, tracking_uri=uri, experiment="e")
    assert uploads == []
    (run_dir / "a" / "gates.json").write_text('{"logprobs": "Aligned"}')
    tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert uploads == ["gates.json"]
    client = client_of(uri)
    stored = client.download_artifacts(tracked.child_run_ids["a"], "gates.json", str(tmp_path))
    assert Path(stored).read_text() == '{"logprobs": "Aligned"}'


def test_a_run_folder_without_a_ledger_has_no_child_and_says_so(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = make_run(tmp_path, "no-ledger", steps=2)
    (run_dir / "a" / "ledger.jsonl").unlink()
    with caplog.at_level(logging.WARNING, logger="tasks.tracking"):
        tracked = sync(run_dir, tracking_uri=uri, experiment="e")
    assert tracked.run_id is not None
    assert tracked.child_run_ids == {}
    assert "none of its sub-folders has a ledger.jsonl" in tracked.problems[0]
    assert "none of its sub-folders has a ledger.jsonl" in caplog.text
    assert len(find_runs(uri, "e", {"lockstep.run_id": "no-ledger"})) == 1


def test_a_quiet_sync_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = make_run(tmp_path, "quiet", steps=1)
    (run_dir / "spec.json").write_text("{")
    assert sync_quietly(run_dir) is None
    assert "spec.json is not a readable RunSpec" in caplog.text


def test_the_default_store_lies_beside_the_run_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    tracked = sync_quietly(make_run(tmp_path / "runs of mine", "default", steps=1))
    assert tracked is not None
    database = tmp_path / "runs of mine" / "mlflow.db"
    assert database.is_file()
    assert tracked.ui_command == f"mlflow ui --backend-store-uri 'sqlite:///{database}'"
    (parent,) = find_runs(tracked.uri, "tiny_cpu", {"lockstep.kind": "run"})
    artifacts = tmp_path / "runs of mine" / "mlartifacts"
    assert (artifacts / parent.run_id / "artifacts" / "spec.json").is_file()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://example.invalid:5000")
    assert tracking.default_tracking_uri(tmp_path / "r") == "http://example.invalid:5000"


def test_find_runs_takes_all_tags_and_refuses_what_it_cannot_ask(tmp_path: Path, uri: str) -> None:
    run_dir = make_run(tmp_path, "it's found", steps=1)
    tracked = sync(run_dir, tracking_uri=uri, experiment="found")
    found = find_runs(uri, "found", {"lockstep.run_id": "it's found", "lockstep.kind": "run"})
    assert [run.run_id for run in found] == [tracked.run_id]
    assert find_runs(uri, "found", {"lockstep.run_id": "another"}) == ()
    assert find_runs(uri, "no such experiment") == ()
    with pytest.raises(LockstepError, match="both kinds of quotes"):
        find_runs(uri, "found", {"lockstep.run_id": "'\""})


def test_a_server_that_was_down_or_hung_catches_up_and_has_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    run_dir = make_run(tmp_path, "http", legs=("a", "b"), steps=3)
    append(run_dir / "a" / "metrics.jsonl", {"step": 3, "metrics": {"x": "nan", "y": "inf"}})

    began = time.monotonic()
    down = sync(run_dir, tracking_uri=uri, experiment="e")
    assert time.monotonic() - began < 15
    assert down.run_id is None
    assert "Nothing is lost" in down.problems[0]
    with pytest.raises(LockstepError, match="cannot be read from MLflow"):
        find_runs(uri, "e")

    with mlflow_server(tmp_path, port) as process:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        up = sync(run_dir, tracking_uri=uri, experiment="e")
        assert up.problems == ()
        assert steps_of(up) == each_once(3)
        assert math.isnan(history(up, "a", "x")[0][1])
        assert history(up, "a", "y") == [(3, sys.float_info.max)]
        page = f"{uri}/#/experiments/1/runs/{up.run_id}"
        assert up.ui_command == f"python -m webbrowser '{page}'"

        for leg in ("a", "b"):
            append_steps(run_dir / leg, range(4, 6))
        os.killpg(process.pid, signal.SIGSTOP)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        hung = sync(run_dir, tracking_uri=uri, experiment="e")
        assert len(hung.problems) == 1
        os.killpg(process.pid, signal.SIGCONT)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        tracked = sync(run_dir, tracking_uri=uri, experiment="e")
        assert (tracked.run_id, tracked.problems) == (up.run_id, ())
        assert {leg: steps_of(tracked, leg) for leg in "ab"} == {leg: each_once(5) for leg in "ab"}
        child = tracked.child_run_ids["b"]
        stored = client_of(uri).download_artifacts(child, "ledger.jsonl", str(tmp_path))
        assert Path(stored).read_bytes() == (run_dir / "b" / "ledger.jsonl").read_bytes()
        assert len(newest_samples(run_dir / "b" / "samples.jsonl")) == 10
