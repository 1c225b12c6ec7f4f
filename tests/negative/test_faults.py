"""Every fault of the catalogue, on live engines: caught by what has to catch it, at its place.

One drill runs them all: one Ray session, one trainer, one rollout engine, one checkpoint. Before
each fault the engines are brought back to the checkpoint, and its state digest is compared.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.drill import live
from engines.drill.catalogue import DRILL, FAULTS, chosen_faults, drill_spec
from engines.drill.fault import CATCHERS, Catch, Finding
from flows.drill import summary
from model_specs.errors import SpecError
from tests.flows.command_line import ROOT

SMALLEST_CATALOGUE = 40
DRILL_FOLDER = Path(live.__file__).parent


pytestmark = pytest.mark.timeout(1600)
"""The first of them waits for the whole drill."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_at_its_place(drilled: dict[str, Any], name: str) -> None:
    (row,) = (row for row in drilled["faults"] if row["fault"] == name)
    assert row["missed"] == [], [
        f"{f['by']} at {f['where']}: {f['detail']}" for f in row["findings"]
    ]
    assert row["caught"] is True
    assert row["by"] == FAULTS[name].caught[0].by


@pytest.mark.slow
def test_without_a_fault_the_same_courses_find_nothing(drilled: dict[str, Any]) -> None:
    """Run before the first fault and after the last one: no fault left a trace."""
    assert drilled["false_alarms"] == []
    assert drilled["num_controls"] >= 2 * 5
    assert drilled["code"] == 0


@pytest.mark.slow
def test_what_only_a_comparison_can_see_leaves_the_gates_green(drilled: dict[str, Any]) -> None:
    """So that the catalogue does not pass because everything is red at once."""
    found = {
        row["fault"]: {finding["by"] for finding in row["findings"]} for row in drilled["faults"]
    }
    for name in ("samples swapped", "gradient scale", "moments of another parameter"):
        assert found[name] == {"diff"}, name
    assert found["stale weights behind echoed digests"] >= {"log-prob gate"}
    assert "sent = received" not in found["stale weights behind echoed digests"]
    assert "log-prob gate" not in found["gate given the rollout's own log-probs"]


def test_the_catalogue_is_large_enough_and_every_breaker_is_there() -> None:
    assert len(FAULTS) >= SMALLEST_CATALOGUE
    assert len(DRILL) == 10
    broken = {
        f"engines.drill.in_{place}:{item.name}"
        for place in ("driver", "trainer", "rollout")
        for item in ast.parse((DRILL_FOLDER / f"in_{place}.py").read_text(encoding="utf-8")).body
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
    }
    assert broken == {fault.breaker for fault in FAULTS.values()}
    drill_spec()


def test_a_catch_is_met_by_its_catcher_at_its_place_alone() -> None:
    catch = Catch(by="diff", step=3, probe="tokens", name="{sample}", says="1 of")
    finding = Finding(by="diff", step=3, probe="tokens", name="3/x/0", detail="1 of 8")
    assert catch.is_met_by(finding, sample="3/x/0")
    assert not catch.is_met_by(finding, sample="3/x/1")
    others: dict[str, Any] = {
        "by": "verify",
        "step": 4,
        "probe": "rewards",
        "name": "3/x/1",
        "detail": "2 of 8",
    }
    for field, value in others.items():
        changed = {name: getattr(finding, name) for name in others} | {field: value}
        assert not catch.is_met_by(Finding(**changed), sample="3/x/0"), field


def test_the_drill_ends_with_0_only_when_nothing_is_wrong() -> None:
    caught, missed = {"caught": True}, {"caught": False}
    alarm = {"by": "diff", "where": "step 3"}
    for faults, alarms, code in (
        ([caught, caught], [], 0),
        ([caught, missed], [], 1),
        ([caught], [alarm], 1),
        ([], [], 1),
    ):
        found = summary({"faults": faults, "false_alarms": alarms})
        assert found["exit_code"] == code, found


def test_every_catcher_is_described_and_needed() -> None:
    used = {catch.by for fault in FAULTS.values() for catch in fault.caught}
    assert used == set(CATCHERS)


def test_an_unknown_fault_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="no fault 'gravity'; there are: token changed"):
        chosen_faults(("gravity",))
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "drill", "--fault", "gravity"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no fault 'gravity'" in done.stderr
