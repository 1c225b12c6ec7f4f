"""Nights for real: varied, resumed, against last night, and red after a changed op.

The first two are watched runs of the shipped deployment; the third is run from a copy of the
sources with one op changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.provenance.diff import compare_ledgers
from engines.provenance.ledger import verify_ledger
from engines.provenance.lock import read_lock
from engines.provenance.verdict import Verdict
from flows import leg
from model_specs.json_text import read_json
from model_specs.run_spec import ExecutionSpec
from model_specs.variation import Variation, draw_variation
from tests.flows.command_line import ROOT
from tests.flows.conftest import Night
from tests.flows.prefect_server import SHORTEST, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OP = Path("engines") / "numerics" / "products.py"
AS_IT_IS = "F.linear(padded, weight.to(dtype).contiguous(), bias).to(x.dtype)"
CHANGED = "_with_bias(F.linear(padded, weight.to(dtype).contiguous()).to(x.dtype), bias)"
WITH_BIAS = """

def _with_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias.to(product.dtype)
"""
"""A refactoring that looks harmless: the bias is added after the product was rounded."""


def rows_of(night: Night) -> dict[str, dict[str, Any]]:
    """Claim -> row; the baseline's name is left out of its own."""
    rows = night.details["night"]["rows"]
    return {row["name"].split(" = ")[0]: row for row in rows}


def test_the_first_night_holds_and_shows_that_it_has_no_baseline(first_night: Night) -> None:
    rows = rows_of(first_night)
    assert [rows[name]["verdict"] for name in ("a", "resume", "tonight", "train")] == [
        *("Identical", "Identical"),
        *(None, "Aligned"),
    ]
    assert rows["tonight"]["label"] == "no baseline"
    assert first_night.details["headline"].startswith(
        "a = b, resume = a, no baseline, train = rollout: 2 steps, "
    )
    assert first_night.details["night"]["commit"]


def test_leg_b_was_really_run_under_what_was_declared(first_night: Night) -> None:
    a, b = (read_json(first_night.folder / name / "environment.json") for name in "ab")
    varied = b["ambient"]["variation"]
    assert "ambient" not in a
    there = [b["trainer"]["ambient"], *(found["ambient"] for found in b["rollout"].values())]
    assert len(b["rollout"]) == len(a["rollout"]) + 1 == 2
    for process in there:
        assert process["python_hash_seed"] == varied["variables"]["PYTHONHASHSEED"]
        assert process["host_variable"] == varied["variables"]["HOSTNAME"]
        assert process["language"] == "C"
        assert process["temporary_folder"] != a["trainer"]["ambient"]["temporary_folder"]
        assert process["time_zone"] != a["trainer"]["ambient"]["time_zone"]
    assert (a["trainer"]["torch"]["threads"], b["trainer"]["torch"]["threads"]) == (1, 2)
    # Before each forward of each engine: a completion has that many at least.
    slept = {name: first_step(first_night.folder / name) for name in "ab"}
    assert "perf/rollout_delays" not in slept["a"]
    longest = slept["b"]["rollout/response_length/max"]
    assert slept["b"]["perf/rollout_delays"] >= longest > 1
    # Sixty-four rewards (each is computed twice) of up to 10 ms each.
    seconds = {name: first_step(first_night.folder / name)["perf/reward_s"] for name in "ab"}
    assert seconds["b"] > seconds["a"] + 0.1
    assert all(suspect.endswith("on purpose") for suspect in rows_of(first_night)["a"]["suspects"])
    page = (first_night.folder / "report.html").read_text()
    for value in ("What leg b was run under", varied["variables"]["PYTHONHASHSEED"]):
        assert value in page


def first_step(folder: Path) -> dict[str, float]:
    """Metrics of step 1 of a leg."""
    line = (folder / "metrics.jsonl").read_text().splitlines()[0]
    metrics: dict[str, float] = json.loads(line)["metrics"]
    return metrics


def test_the_resumed_leg_is_the_second_half_of_a_in_a_fresh_process(first_night: Night) -> None:
    lines = verify_ledger(first_night.folder / "resume").lines
    assert [line.key for line in lines] == [(1, -1), (2, 0)]
    found = compare_ledgers(first_night.folder / "a", first_night.folder / "resume", verify=True)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 1)
    assert not any(row.cached for row in read_lock(first_night.folder / "resume"))
    pids = {
        facts["pid"]
        for result in first_night.details["legs"].values()
        for facts in result["processes"].values()
    }
    assert len(pids) == 7  # a: 2, b: 3, resume: 2


@pytest.mark.exhaustive
def test_the_second_night_compares_with_the_first_and_is_red_by_its_own_leg(
    second_night: Night,
) -> None:
    rows = rows_of(second_night)
    assert rows["tonight"]["name"] == "tonight = first"
    assert [rows[name]["verdict"] for name in ("a", "resume", "tonight")] == [
        *("Diverged", "Identical", "Identical")
    ]
    assert second_night.details["night"]["decisive"] == "a = b"
    assert second_night.details["night"]["variation"]["varied"] == []


@pytest.fixture(scope="module")
def third_night(server: Server, second_night: Night, tmp_path_factory: Any) -> Night:
    """The same night from a copy of the sources in which one op rounds once more."""
    assert second_night.code != 0
    copy = tmp_path_factory.mktemp("changed sources")
    for package in ("flows", "tasks", "engines", "model_specs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    source = (copy / OP).read_text()
    assert source.count(AS_IT_IS) == 1
    (copy / OP).write_text(source.replace(AS_IT_IS, CHANGED) + WITH_BIAS)
    runs_dir = server.folder / "runs"
    overrides = [part for key, value in SHORTEST.items() for part in ("--set", f"{key}={value}")]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "flows.cli", "nightly", "tiny_cpu", *overrides),
            *("--vary", "hash_seed", "--run-id", "third", "--runs-dir", str(runs_dir)),
        ],
        env={**server.environment, "PYTHONPATH": str(copy)},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    shown = {"stdout": ended.stdout, "stderr": ended.stderr}
    return Night(code=ended.returncode, flow_run=shown, folder=runs_dir / "third")


@pytest.mark.exhaustive
def test_a_changed_op_is_red_against_last_night_and_is_the_first_suspect(
    third_night: Night,
) -> None:
    assert third_night.code == 10, third_night.flow_run
    rows = rows_of(third_night)
    # The op is the same under both engines and in all legs: only last night can tell.
    assert [rows[name]["verdict"] for name in ("a", "resume", "tonight", "train")] == [
        *("Identical", "Identical", "Diverged", "Aligned")
    ]
    # The second night was red, so the first is the last green one.
    assert rows["tonight"]["name"] == "tonight = first"
    place = r"first difference at step 1 update 0 (tokens|rollout_logprobs) 1/"
    assert re.search(place, rows["tonight"]["summary"])
    suspect = third_night.details["night"]["first_suspect"]
    assert suspect.startswith(f"op code {OP}: ")
    assert f"tonight = first, first suspect {suspect}" in third_night.details["headline"]
    assert f"suspect 1: {suspect}" in third_night.flow_run["stdout"]


@pytest.mark.exhaustive
def test_all_nights_are_on_one_page(third_night: Night) -> None:
    page = (third_night.folder.parent / "nights.html").read_text()
    places = [page.index(f'href="{name}/report.html"') for name in ("third", "second", "first")]
    assert places == sorted(places)
    assert f"op code {OP}" in page
    assert "no baseline" in page


def test_a_leg_whose_process_leaves_no_result_is_an_engine_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho progress\necho it broke >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(leg.sys, "executable", str(program))
    monkeypatch.setattr(leg, "_server", lambda: "http://127.0.0.1:9/api")
    result = leg.run_elsewhere(leg.LegRequest(folder=str(tmp_path), leg="b", attempt=1))
    assert result.verdict is Verdict.ENGINE_FAILURE
    assert result.reason == "its process ended with status 3 and left no result: it broke"


def test_the_fresh_process_has_the_declared_variables_and_none_of_the_flow_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leg, "_server", lambda: "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "another run's")
    variation = draw_variation(1, execution=ExecutionSpec())
    with leg._environment(variation) as found:
        assert not [name for name in found if name.startswith("PREFECT__")]
        assert variation.variables.items() <= found.items()
        assert found["PREFECT_API_URL"] == "http://127.0.0.1:9/api"
        assert found["PYTHONPATH"].split(":")[0] == str(ROOT)
        folder = Path(found["TMPDIR"])
        assert folder.is_dir()
    assert not folder.exists()
    with leg._environment(Variation()) as found:
        assert found.get("TMPDIR") == os.environ.get("TMPDIR")
