"""What is sent of a run folder: no step is lost, no two values are merged, places are no facts."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from model_specs.errors import ArtifactError
from model_specs.recipes.tiny_cpu import recipe
from tasks.samples_table import COLUMNS, MAX_ROWS, newest_samples, samples_table
from tasks.tracked_folder import (
    MAX_VALUE_CHARACTERS,
    Leg,
    git_tags,
    leg_status,
    leg_tags,
    read_run_folder,
    run_status,
    shortened,
    verdict_points,
)


def environment_tag(folder: Path, torch: str, host: str) -> str:
    facts = {"trainer": {"torch": torch, "ambient": {"host": host}}}
    (folder / "environment.json").write_text(json.dumps(facts))
    tags = leg_tags(Leg(name="a", folder=folder, steps=()), device="cpu")
    return tags["lockstep.environment_fingerprint"]


def test_the_environment_tag_changes_with_a_fact_and_not_with_the_host(tmp_path: Path) -> None:
    tag = environment_tag(tmp_path, "2.13.0", "one")
    assert environment_tag(tmp_path, "2.13.0", "other") == tag
    assert environment_tag(tmp_path, "2.13.1", "one") != tag


def make_run(root: Path, metrics: str) -> Path:
    (root / "a").mkdir()
    (root / "run.json").write_text('{"run_id": "r"}')
    (root / "spec.json").write_text(recipe().model_dump_json())
    (root / "a" / "ledger.jsonl").touch()
    (root / "a" / "metrics.jsonl").write_text(metrics)
    return root


LINES = """\
{"step": 1, "update": 0, "metrics": {"reward/mean": 0.5, "train/lr": 1.0, "perf/step_s": 2.0}}
{"step": 1, "update": 1, "metrics": {"train/lr": 2.0, "perf/step_s": 3.0}}
{"step": 2, "update": 0, "metrics": {"reward/mean": "nan", "perf/step_s": NaN}}
"""


def test_the_updates_of_a_step_are_one_point_with_the_last_values(tmp_path: Path) -> None:
    (leg,) = read_run_folder(make_run(tmp_path, LINES)).legs
    assert [step.step for step in leg.steps] == [1, 2]
    assert leg.steps[0].values == {"reward/mean": 0.5, "train/lr": 2.0, "perf/step_s": 3.0}
    assert math.isnan(leg.steps[1].values["reward/mean"])
    assert [step.elapsed_ms for step in leg.steps] == [3001, 3002]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_left_for_later_and_a_whole_one_is_taken(
    tmp_path: Path, cut: int
) -> None:
    (leg,) = read_run_folder(make_run(tmp_path, LINES[:-cut])).legs
    assert [step.step for step in leg.steps] == ([1, 2] if cut == 1 else [1])


def test_a_damaged_line_is_named_with_file_and_number(tmp_path: Path) -> None:
    run = make_run(tmp_path, LINES[5:])
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl, line 1: not JSON"):
        read_run_folder(run)


def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path, '{"step": 1, "metrics": {"reward/mean": "high"}}\n')
    with pytest.raises(ArtifactError, match="reward/mean is 'high', which is not a number"):
        read_run_folder(run)


def test_a_long_table_keeps_the_newest_rows() -> None:
    rows = [{column: step for column in COLUMNS} for step in range(MAX_ROWS + 5)]
    table = json.loads(samples_table(rows))
    assert len(table["data"]) == MAX_ROWS
    assert table["data"][0][0] == 5


def test_a_sample_without_a_column_is_refused_by_name() -> None:
    with pytest.raises(ArtifactError, match="has no 'reward'"):
        samples_table([{column: 0 for column in COLUMNS if column != "reward"}])


def test_a_sample_that_was_drawn_again_replaces_the_first(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"request_id": name, "reward": reward} for name, reward in (("1/p/0", 1), ("2/p/0", 2))]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | {"reward": 3}]))
    assert newest_samples(path) == [rows[1], {"request_id": "1/p/0", "reward": 3}]


def test_a_verdict_that_compared_nothing_has_no_points() -> None:
    assert verdict_points({}) == []
    assert verdict_points({"verdict": "Aligned", "comparison": None}) == []
    refused = {"verdict": "Incomparable", "comparison": {"verdict": "Incomparable"}}
    assert verdict_points(refused) == []


def test_a_difference_at_line_0_drops_before_the_first_step() -> None:
    first = {"step": 0, "probe": "weights", "max_ulp": None}
    comparison = {"verdict": "Diverged", "common_steps": 4, "first": first}
    points = verdict_points({"comparison": comparison})
    assert points == [("repro/identical", step, 0.0) for step in range(5)]


@pytest.mark.parametrize(
    ("verdict", "run", "leg"),
    [
        (None, "RUNNING", "RUNNING"),
        ("Identical", "FINISHED", "FINISHED"),
        ("Aligned", "FINISHED", "FINISHED"),
        ("Diverged", "FAILED", "FINISHED"),
        ("EngineFailure", "FAILED", "FAILED"),
        ("Cancelled", "KILLED", "KILLED"),
    ],
)
def test_only_a_green_verdict_is_finished(verdict: str | None, run: str, leg: str) -> None:
    record = {} if verdict is None else {"verdict": verdict}
    assert (run_status(record), leg_status(record)) == (run, leg)


def test_long_values_are_cut_and_stay_different() -> None:
    one, other = "x" * 9000, "x" * 8999 + "y"
    cut = shortened(one)
    assert len(cut) == MAX_VALUE_CHARACTERS
    assert cut != shortened(other)
    assert shortened("short") == "short"


def test_git_tags_tell_commit_and_dirty_and_only_of_a_tracked_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "module.py"
    file.write_text("x = 1\n")
    git("init", "-q")
    assert git_tags(file) == {}, "not tracked there"
    git("add", "module.py")
    git("commit", "-q", "-m", "first")
    clean = git_tags(file)
    assert (clean["git.commit"], clean["git.dirty"]) == (git("rev-parse", "HEAD"), "false")
    file.write_text("x = 2\n")
    assert git_tags(file)["git.dirty"] == "true"
