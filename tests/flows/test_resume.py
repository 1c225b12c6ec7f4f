"""A run that goes on in a fresh process is bit for bit the run that was never interrupted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engines import runs
from engines.provenance.diff import compare_ledgers
from engines.provenance.fence import Fence
from engines.provenance.ledger import read_ledger, verify_ledger
from engines.provenance.verdict import Verdict
from model_specs.errors import SpecError, StaleAttemptError
from tests.flows.command_line import SHORT, CommandLine, Ended

pytestmark = pytest.mark.slow

RUN = "interrupted"


@pytest.fixture(scope="module")
def four_steps(lockstep: CommandLine) -> Path:
    """A run of four steps with a checkpoint every second one."""
    few = ("--set", "plan.num_steps=4", "--set", "plan.checkpoint_every=2")
    ended = lockstep("run", "tiny_cpu", "--run-id", RUN, *few, *SHORT)
    assert ended.code == 0, ended
    assert "\nAligned\n" in ended.stdout
    return lockstep.runs_dir / RUN


@pytest.fixture(scope="module")
def extended(lockstep: CommandLine, four_steps: Path) -> Ended:
    """The same run, gone on with to eight steps by a process of its own."""
    return lockstep("resume", RUN, "--set", "plan.num_steps=8")


def num_judged_tokens(run: Path) -> int:
    """Tokens that the verdict speaks of."""
    return int(json.loads((run / "verdict.json").read_text())["alignment"]["num_tokens"])


def num_tokens(run: Path) -> int:
    """Tokens of all steps in the ledger."""
    lines = read_ledger(run / "a").lines
    return int(sum(line.metrics.get("gate/num_tokens", 0) for line in lines))


@pytest.mark.usefixtures("extended")
def test_four_and_four_steps_with_a_fresh_process_between_are_eight_steps(
    four_steps: Path, extended: Ended, twin_folder: Path
) -> None:
    assert extended.code == 0, extended
    assert num_judged_tokens(four_steps) == num_tokens(four_steps)
    shown = re.findall(r"^a (\d)/8 reward", extended.stdout, re.MULTILINE)
    assert shown == ["5", "6", "7", "8"]
    found = compare_ledgers(four_steps / "a", twin_folder / "a", verify=True)
    assert found.verdict is Verdict.IDENTICAL, found.headline
    assert found.common_steps == 8


@pytest.mark.usefixtures("extended")
def test_a_resumed_run_is_a_new_attempt_and_says_so_in_its_lock(four_steps: Path) -> None:
    rows = json.loads((four_steps / "a" / "lock.json").read_text())["rows"]
    trained = [(row["attempt"], row["stage"]) for row in rows if row["stage"] == "train"]
    assert trained == [(1, "train"), (1, "train"), (2, "train"), (2, "train")]


@pytest.mark.usefixtures("extended")
def test_the_attempt_that_was_overtaken_cannot_write_any_more(four_steps: Path) -> None:
    older = Fence(str(four_steps), 1)
    with pytest.raises(StaleAttemptError, match=r"attempt 1 .*attempt 2"), older.hold():
        pytest.fail("the older attempt was let in")
    newest = Fence(str(four_steps), 2)
    with newest.hold():
        pass


@pytest.mark.exhaustive
@pytest.mark.usefixtures("extended")
def test_an_earlier_step_drops_what_came_after_and_gives_the_same_chain_again(
    lockstep: CommandLine, four_steps: Path, twin_folder: Path
) -> None:
    before = read_ledger(four_steps / "a")
    assert before.last_step == 8
    again = lockstep("resume", f"{RUN}@4", "--set", "plan.num_steps=6")
    assert again.code == 0, again
    assert re.findall(r"^a (\d)/6 reward", again.stdout, re.MULTILINE) == ["5", "6"]
    after = verify_ledger(four_steps / "a")
    assert num_judged_tokens(four_steps) == num_tokens(four_steps)
    assert [line.chain for line in after.lines] == [line.chain for line in before.lines[:7]]
    assert compare_ledgers(four_steps / "a", twin_folder / "a").common_steps == 6
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (four_steps / "a" / name).read_text().splitlines()
        recorded = [json.loads(line)["step"] for line in lines]
        assert sorted(recorded) == recorded
        assert set(recorded) == set(range(1, 7))
    assert len((four_steps / "a" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_change_of_the_trajectory_is_refused_with_the_field_and_both_values(
    lockstep: CommandLine, four_steps: Path
) -> None:
    attempts = json.loads((four_steps / "run.json").read_text())["attempt"]
    ended = lockstep("resume", RUN, "--set", "optimizer.lr=0.5")
    assert ended.code == 2, ended
    assert "optimizer.lr: 0.005 -> 0.5" in ended.stderr
    assert json.loads((four_steps / "run.json").read_text())["attempt"] == attempts


def test_a_run_with_no_step_left_is_refused_and_keeps_its_verdict(
    lockstep: CommandLine, four_steps: Path
) -> None:
    last = runs.read_spec(four_steps).plan.num_steps
    before = [(four_steps / name).read_bytes() for name in ("run.json", "verdict.json")]
    ended = lockstep("resume", RUN)
    assert ended.code == 2, ended
    assert f"is at step {last} and plan.num_steps={last}: no step is left" in ended.stderr
    assert [(four_steps / name).read_bytes() for name in ("run.json", "verdict.json")] == before


def test_a_step_without_a_checkpoint_lists_those_that_there_are(
    lockstep: CommandLine, four_steps: Path
) -> None:
    present = sorted(runs.checkpoints(four_steps / "a"))
    assert 2 in present
    assert 3 not in present
    ended = lockstep("resume", f"{RUN}@3")
    assert ended.code == 2, ended
    assert f"no committed checkpoint of step 3; it has {present}" in ended.stderr


def test_a_plan_change_alone_is_allowed_and_a_seed_is_not(four_steps: Path) -> None:
    from flows.train import resumable

    spec = runs.read_spec(four_steps)
    assert resumable(spec, ("plan.num_steps=16",)).plan.num_steps == 16
    assert resumable(spec, ("execution.max_num_seqs=3",)).execution.max_num_seqs == 3
    with pytest.raises(SpecError, match=r"seeds\.root: 1234 -> 7"):
        resumable(spec, ("seeds.root=7",))
