"""Where a run is executed never decides a bit: two ranks and two rollout engines, one chain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.provenance.diff import compare_ledgers
from engines.provenance.verdict import Verdict
from model_specs.json_text import read_json
from tests.flows.command_line import SHORT, CommandLine

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_two_ranks_and_two_rollout_engines_give_the_chain_of_one_each(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    layout = ("execution.trainer_ranks=2", "execution.rollout_engines=2", "plan.num_steps=3")
    overrides = [part for change in layout for part in ("--set", change)]
    ended = lockstep("run", "tiny_cpu", "--run-id", "two-by-two", *overrides, *SHORT)
    assert ended.code == 0, ended
    folder = lockstep.runs_dir / "two-by-two"
    processes = read_json(folder / "verdict.json")["legs"]["a"]["processes"]
    assert sorted(processes) == ["rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    assert len({facts["pid"] for facts in processes.values()}) == 4
    environment = read_json(folder / "a" / "environment.json")
    assert sorted(environment["rollout"]) == ["rollout-0", "rollout-1"]
    found = compare_ledgers(folder / "a", twin_folder / "a", verify=True)
    assert found.verdict is Verdict.IDENTICAL, found.headline
    assert found.common_steps == 3
    assert found.identity_differences == ()


def test_the_comparison_does_see_a_different_number_of_slots(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    """The negative control: slots are identity, so that a layout cannot hide in them."""
    spec = read_json(twin_folder / "spec.json")
    assert spec["reduction"]["slots"] == 4
    shown = lockstep("run", "tiny_cpu", "--dry-run", "--json", "--set", "reduction.slots=8")
    same = lockstep("run", "tiny_cpu", "--dry-run", "--json")
    other_layout = lockstep(
        *("run", "tiny_cpu", "--dry-run", "--json", "--set", "execution.trainer_ranks=2")
    )
    assert trajectory(shown.stdout) != trajectory(same.stdout)
    assert trajectory(other_layout.stdout) == trajectory(same.stdout)


def trajectory(shown: str) -> str:
    """The trajectory fingerprint of a dry run."""
    return str(json.loads(shown)["trajectory_fingerprint"])
