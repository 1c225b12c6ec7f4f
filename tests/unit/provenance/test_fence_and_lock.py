"""Laws of attempts, their fence, durable writes and the lock."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engines.provenance.fence import Fence, RunFolder, write_durably
from engines.provenance.lock import (
    LockRow,
    append_row,
    compare_outputs,
    final_rows,
    read_lock,
)
from model_specs.errors import ArtifactError, SpecError, StaleAttemptError


def row(stage: str, **outputs: str) -> LockRow:
    return LockRow(
        stage=stage,
        version=1,
        inputs={"model": "d0"},
        outputs=outputs,
        trajectory="t",
        attempt=1,
        cached=False,
        ambient={"seconds": 0.5},
    )


def _take_attempts(path: str, count: int, queue: multiprocessing.Queue) -> None:
    for _ in range(count):
        queue.put(RunFolder.open(path).new_attempt().token)


def test_attempts_started_at_once_never_share_a_token(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", run_id="r")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=_take_attempts, args=(str(tmp_path / "run"), 10, queue))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    tokens = [queue.get(timeout=60) for _ in range(30)]
    for process in processes:
        process.join(60)
    assert sorted(tokens) == list(range(1, 31))


def test_a_newer_attempt_makes_the_older_one_stale(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", run_id="r")
    assert (folder.run_id, folder.current_token()) == ("r", 0)
    old = folder.new_attempt()
    old.check()
    new = folder.new_attempt()
    with pytest.raises(StaleAttemptError, match=r"attempt 1 .*attempt 2 has started"):
        old.check()
    with pytest.raises(StaleAttemptError), old.hold():
        pytest.fail("a stale attempt was let in")
    with new.hold():
        assert folder.current_token() == 2


def test_a_newer_attempt_waits_for_a_write_that_has_begun(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", run_id="r")
    fence = folder.new_attempt()
    tokens: list[int] = []
    newer = threading.Thread(target=lambda: tokens.append(folder.new_attempt().token))
    with fence.hold():
        newer.start()
        time.sleep(0.2)
        assert tokens == []
        fence.check()
    newer.join(30)
    assert tokens == [2]


def test_a_run_folder_is_made_once_and_opened_only_where_there_is_one(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", run_id="first")
    with pytest.raises(SpecError, match=r"already holds run 'first', so 'second'"):
        RunFolder.create(tmp_path / "run", run_id="second")
    with pytest.raises(ArtifactError, match="not a run folder"):
        RunFolder.open(tmp_path)
    with pytest.raises(ArtifactError, match="not a run folder"):
        Fence(str(tmp_path), 1).check()


def test_an_attempt_keeps_other_facts_of_the_run_and_refuses_other_schemas(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", run_id="r")
    path = tmp_path / "run" / "run.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"label": "mine"}))
    folder.new_attempt()
    assert json.loads(path.read_text())["label"] == "mine"
    path.write_text(json.dumps(values | {"schema_version": 9}))
    with pytest.raises(ArtifactError, match=r"schema version 9; this version of Lockstep reads 1"):
        folder.current_token()
    path.write_text("{")
    with pytest.raises(ArtifactError, match="not JSON"):
        folder.current_token()


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"
    write_durably(path, b"old")
    with pytest.raises(TypeError):
        write_durably(path, "not bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_lock_rows_are_kept_in_order_and_read_back(tmp_path: Path) -> None:
    rows = (row("download", model="d1"), row("convert", dcp="d2"))
    for each in rows:
        append_row(tmp_path, each)
    assert read_lock(tmp_path) == rows


def test_a_missing_damaged_or_foreign_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no stage has ended"):
        read_lock(tmp_path)
    path = tmp_path / "lock.json"
    path.write_text('{"schema_version": 7, "rows": []}')
    with pytest.raises(ArtifactError, match=r"schema version 7; .* reads 1"):
        read_lock(tmp_path)
    path.write_text('{"schema_version": 1, "rows": [{"stage": "x"}]}')
    with pytest.raises(ArtifactError, match="is damaged"):
        read_lock(tmp_path)


def segment(stage: str, first: int, last: int, **outputs: str) -> LockRow:
    return replace(row(stage, **outputs), ambient={"steps": (first, last)})


def test_locks_are_compared_stage_by_stage_and_only_what_differs_is_named() -> None:
    locked = [
        row("download", model="m", data="d"),
        row("convert", dcp="c"),
        row("engines"),
        segment("train", 0, 4, state="s4", chain="k4"),
        segment("checkpoint", 0, 4, checkpoint="s4"),
        segment("train", 4, 8, state="s8", chain="k8"),
        row("export", export="e"),
    ]
    assert all(output.is_equal for output in compare_outputs(locked, locked))
    assert len(compare_outputs(locked, locked)) == 9
    again = [*locked[:5], segment("train", 4, 8, state="S8", chain="k8"), locked[6]]
    (wrong,) = [output for output in compare_outputs(locked, again) if not output.is_equal]
    assert str(wrong) == "stage train 5-8: state: locked s8, found S8"


def test_a_stage_that_was_not_reached_has_nothing_to_compare() -> None:
    locked = [row("download", model="m"), row("convert", dcp="c")]
    found = compare_outputs(locked, locked[:1])
    assert [(output.stage, output.found) for output in found] == [
        ("download", "m"),
        ("convert", None),
    ]
    assert not found[1].is_equal


def test_the_row_of_a_later_attempt_stands_for_that_of_an_earlier_one() -> None:
    rows = [
        segment("checkpoint", 0, 4, checkpoint="torn"),
        replace(segment("checkpoint", 2, 4, checkpoint="whole"), attempt=2),
    ]
    assert {name: found.outputs for name, found in final_rows(rows).items()} == {
        "checkpoint 4": {"checkpoint": "whole"}
    }
