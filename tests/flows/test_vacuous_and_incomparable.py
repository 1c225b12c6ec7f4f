"""Vacuous and Incomparable as a user meets them: whole runs of the command line, by exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.flows.command_line import SHORT, CommandLine, Ended

pytestmark = pytest.mark.slow

EQUAL = """
def score(completion, label, *, spec, finish_reason, metadata):
    return 0.5
"""


@pytest.fixture(scope="module")
def equal_rewards(lockstep: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of one step whose own reward is the same for everything."""
    reward = tmp_path_factory.mktemp("reward") / "equal.py"
    reward.write_text(EQUAL, encoding="utf-8")
    return lockstep(
        *("run", "tiny_cpu", "--run-id", "equal", "--json"),
        *("--set", f"reward={reward}:score", "--set", "plan.num_steps=1", *SHORT),
    )


def test_a_run_that_could_not_learn_is_vacuous_and_ends_with_13(equal_rewards: Ended) -> None:
    assert equal_rewards.code == 13, equal_rewards
    details = json.loads(equal_rewards.stdout)
    assert details["verdict"] == "Vacuous"
    assert "no group had rewards that differ" in details["headline"]
    # The log-probs themselves were equal: what is missing is that anything was at stake.
    assert details["alignment"]["exact_fraction"] == 1.0


def test_show_of_it_ends_with_13_too(lockstep: CommandLine, equal_rewards: Ended) -> None:
    shown = lockstep("show", "equal")
    assert shown.code == 13, shown
    assert "Vacuous" in shown.stdout


def test_another_reward_makes_two_runs_incomparable_and_ends_with_12(
    lockstep: CommandLine, twin_folder: Path, equal_rewards: Ended
) -> None:
    ended = lockstep("diff", "equal/a", f"{twin_folder.name}/a")
    assert ended.code == 12, ended
    assert "Incomparable" in ended.stdout
    assert "identity reward.name" in ended.stdout
    declared = lockstep("diff", "equal/a", f"{twin_folder.name}/a", "--across", "reward")
    assert declared.code == 10, declared
    assert "step 1 update 0 rewards" in declared.stdout
