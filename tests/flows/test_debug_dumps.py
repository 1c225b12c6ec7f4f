"""A step that is trained from its dumped rollout leaves the digests that it left in its run."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engines import runs
from engines.contracts import Sample
from engines.faults import flip_float32
from engines.loop import DrawnStep
from engines.provenance.diff import compare_ledgers
from engines.provenance.ledger import LedgerLine, read_ledger, verify_ledger
from engines.provenance.verdict import Verdict
from engines.rollout_dump import dump_path, read_dumps, write_dump
from flows import cli
from flows.halves import NOT_REPLAYED, start_of
from flows.halves import replayed as dumps_and_spec
from flows.run_request import TrainOnlyRequest
from model_specs.errors import ArtifactError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.run_spec import ForkOrigin, RunSpec
from tasks import checkpoint, replay, train
from tests.flows.command_line import SHORT, CommandLine, Ended
from tests.flows.conftest import Runner

REPLAYED = ("train_logprobs", "loss", "grads", "grad_norm", "optimizer", "weights", "sent")


@pytest.fixture(scope="module")
def dumped(runner: Runner) -> Path:
    """A leg of three steps with its rollouts and a checkpoint after step 2."""
    with runner.leg("plan.dump_rollouts=true") as sibling:
        segment = train.train_segment.fn(sibling.name, runner.weights, start_step=0, to_step=2)
        state = checkpoint.checkpoint.fn(sibling.name, segment)
        train.train_segment.fn(sibling.name, state, start_step=2, to_step=3)
        return sibling.folder


def replayed(runner: Runner, place: Path, *overrides: str) -> Path:
    dumps = read_dumps(place)
    start = start_of(dumps, dumps[0].path.parent.parent) or runner.weights
    with runner.leg(*overrides) as sibling:
        replay.train_dumps.fn(sibling.name, start, dumps)
        return sibling.folder


def update(folder: Path, step: int) -> LedgerLine:
    return next(line for line in read_ledger(folder).lines if line.key == (step, 0))


@pytest.mark.slow
def test_all_dumped_steps_replay_to_the_roots_of_the_run(runner: Runner, dumped: Path) -> None:
    again = replayed(runner, dumped)
    for step in (1, 2, 3):
        ours, theirs = update(again, step).roots, update(dumped, step).roots
        assert {probe: ours[probe] for probe in REPLAYED} == {p: theirs[p] for p in REPLAYED}
        assert theirs.keys() - ours.keys() == {"received"}
    found = compare_ledgers(dumped, again, ignoring=NOT_REPLAYED, verify=True)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 3)


@pytest.mark.slow
def test_one_dumped_step_replays_from_the_checkpoint_before_it(
    runner: Runner, dumped: Path
) -> None:
    again = replayed(runner, dump_path(dumped, 3))
    ledger = verify_ledger(again)
    assert [line.key for line in ledger.lines] == [(2, -1), (3, 0)]
    assert update(again, 3).roots["weights"] == update(dumped, 3).roots["weights"]
    found = compare_ledgers(dumped, again, ignoring=NOT_REPLAYED)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 1)


@pytest.mark.slow
def test_a_changed_advantage_is_found_as_the_first_difference(
    runner: Runner, dumped: Path, tmp_path: Path
) -> None:
    content = json.loads(dump_path(dumped, 1).read_text())
    content["advantages"][5] = (float.fromhex(content["advantages"][5]) + 1.0).hex()
    changed = tmp_path / "step-000001.json"
    changed.write_text(json.dumps(content))
    again = replayed(runner, changed)
    found = compare_ledgers(dumped, again, ignoring=NOT_REPLAYED)
    assert found.verdict is Verdict.DIVERGED
    assert found.first is not None
    assert (found.first.step, found.first.probe) == (1, "advantages")


@pytest.mark.slow
def test_a_dump_does_not_hide_that_its_weights_are_others(runner: Runner, dumped: Path) -> None:
    (dump,) = read_dumps(dump_path(dumped, 3))
    with runner.leg() as sibling:
        # Drawn at the weights of step 2, scored at those of step 1's rollout.
        earlier = replace(dump, drawn=replace(dump.drawn, step=1))
        segment = replay.train_dumps.fn(sibling.name, runner.weights, [earlier])
    assert segment.stopped_by is not None
    assert segment.stopped_by.startswith("gate: step 1:")


@pytest.mark.slow
def test_a_dump_reads_back_with_the_bits_it_was_written_with(dumped: Path, tmp_path: Path) -> None:
    (dump,) = read_dumps(dump_path(dumped, 2))
    again = write_dump(tmp_path, dump.drawn, trajectory=dump.trajectory)
    assert again.read_bytes() == dump.path.read_bytes()
    assert read_dumps(again)[0].drawn == dump.drawn
    assert all(math.isfinite(value) for s in dump.drawn.samples for value in s.logprobs)
    assert dump.trajectory == read_ledger(dumped).header.trajectory


@pytest.mark.slow
def test_a_dump_of_another_batch_is_refused_with_both_numbers(runner: Runner, dumped: Path) -> None:
    with pytest.raises(SpecError, match=r"4 prompts and 32 samples, .* but a step .* 4 and 16, "):
        replayed(runner, dumped, "sampling.samples_per_prompt=4")


@pytest.mark.slow
def test_a_dump_of_dynamic_sampling_replays_to_the_roots_of_its_run(runner: Runner) -> None:
    oversampled = "sampling.oversample=2"
    whole = runner.run("plan.dump_rollouts=true", oversampled, steps=1)
    again = replayed(runner, whole, oversampled)
    ours, theirs = update(again, 1).roots, update(whole, 1).roots
    assert ours == {probe: theirs[probe] for probe in theirs if probe != "received"}
    found = compare_ledgers(whole, again, ignoring=NOT_REPLAYED, verify=True)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 1)
    # As many prompts and samples, of which others are trained on.
    with pytest.raises(SpecError, match=r"64 samples, 32 of them .* 8 and 64, 64 of them"):
        replayed(runner, whole, "data.prompts_per_step=8")


@pytest.mark.slow
def test_a_step_without_the_checkpoint_before_it_names_those_there_are(dumped: Path) -> None:
    assert sorted(runs.checkpoints(dumped)) == [2]
    with pytest.raises(SpecError, match=r"weights of step 1, .*\(it has \[2\]"):
        start_of(read_dumps(dump_path(dumped, 2)), dumped)


def empty_step(step: int) -> DrawnStep:
    return DrawnStep(
        step=step, prompts=(), samples=(), rewards=(), advantages=(), groups_with_variance=0
    )


def test_what_a_least_length_forbade_is_read_back_and_older_dumps_forbid_nothing(
    tmp_path: Path,
) -> None:
    sample = Sample(
        request_id="1/p/0",
        prompt_id="p",
        sample_index=0,
        prompt_token_ids=(5, 6),
        token_ids=(8, 3),
        logprobs=(-1.5, -0.1),
        text="x",
        finish_reason="stop",
        stop_token=3,
        forbidden_ids=(3, 50),
        forbidden_until=1,
    )
    drawn = replace(empty_step(1), samples=(sample,), rewards=(0.5,))
    path = write_dump(tmp_path, drawn, trajectory="t")
    assert read_dumps(path)[0].drawn == drawn
    content = json.loads(path.read_text())
    del content["samples"][0]["forbidden_ids"], content["samples"][0]["forbidden_until"]
    path.write_text(json.dumps(content))
    (older,) = read_dumps(path)[0].drawn.samples
    assert older == replace(sample, forbidden_ids=(), forbidden_until=0)


def test_missing_damaged_and_absent_dumps_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds none"):
        read_dumps(tmp_path)
    for step in (1, 3):
        write_dump(tmp_path, empty_step(step), trajectory="t")
    with pytest.raises(ArtifactError, match=r"steps 1 to 3 without \[2\]"):
        read_dumps(tmp_path)
    write_dump(tmp_path, empty_step(2), trajectory="t")
    assert [dump.drawn.step for dump in read_dumps(tmp_path)] == [1, 2, 3]
    dump_path(tmp_path, 2).write_text('{"schema_version": 1')
    with pytest.raises(ArtifactError, match=r"step-000002\.json is damaged"):
        read_dumps(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_two_halves_of_a_run_work_alone_on_the_command_line(lockstep: CommandLine) -> None:
    drawn = lockstep(
        "run", "tiny_cpu", "--rollout-only", "--run-id", "drawn", "--set", "plan.num_steps=2"
    )
    assert drawn.code == 0, drawn
    assert "2 steps were drawn and nothing was trained" in drawn.stdout
    leg = lockstep.runs_dir / "drawn" / "a"
    dumps = read_dumps(leg)
    assert [dump.drawn.step for dump in dumps] == [1, 2]
    # The rewards are there: of every sample in the dump, and their mean where people look.
    rows = (leg / "metrics.jsonl").read_text().splitlines()
    for dump, row in zip(dumps, rows, strict=True):
        rewards = dump.drawn.rewards
        mean = json.loads(row)["metrics"]["reward/mean"]
        assert len(rewards) == len(dump.drawn.samples) == 32
        assert mean == math.fsum(rewards) / len(rewards) > 0
        assert f"a {dump.drawn.step}/2 reward {mean:.2f} " in drawn.stdout
    assert not (leg / "ledger.jsonl").exists()
    first = dump_path(leg, 1)
    trained = lockstep("run", "tiny_cpu", "--train-only", str(first), "--run-id", "trained", *SHORT)
    assert trained.code == 0, trained
    assert re.search(r"^leg a: trainer-0 pid", trained.stdout, re.MULTILINE)
    assert "rollout-0" not in trained.stdout
    line = update(lockstep.runs_dir / "trained" / "a", 1)
    assert line.metrics["gate/logprob_abs_diff/max"] == 0.0
    assert "received" not in line.roots


def test_without_a_recipe_the_spec_is_that_of_the_leg_a_forks_with_its_origin(
    spec: RunSpec, tmp_path: Path
) -> None:
    origin = ForkOrigin(
        step=2, state_digest="s", run="r", leg="a", chain_digest="c", checkpoint="/somewhere"
    )
    forked = RunSpec.model_validate({**spec.model_dump(), "origin": origin.model_dump()})
    trajectory = trajectory_fingerprint(forked)
    place = str(write_dump(tmp_path / "a", empty_step(3), trajectory=trajectory))
    with pytest.raises(SpecError, match=r"a has no spec\.json; name the recipe"):
        dumps_and_spec(TrainOnlyRequest(dump=place))
    runs.write_spec(tmp_path / "a", spec)
    with pytest.raises(SpecError, match=rf"in trajectory {trajectory}, but .*/spec\.json is"):
        dumps_and_spec(TrainOnlyRequest(dump=place))
    runs.write_spec(tmp_path / "a", forked)
    (tmp_path / "a" / "model").mkdir()
    asked = TrainOnlyRequest(dump=place, overrides={"plan.num_steps": 9})
    (dump,), found = dumps_and_spec(asked)
    assert (dump.drawn.step, found.origin, found.plan.num_steps) == (3, origin, 9)
    assert trajectory_fingerprint(found) == trajectory
    assert found.model.path == str(tmp_path / "a" / "model")  # where it came from may be gone
    assert asked.describe() == "own spec plan.num_steps=9 on step-000003.json"
    _, named = dumps_and_spec(TrainOnlyRequest(recipe="tiny_cpu", dump=place))
    assert named == spec


def test_only_train_only_goes_without_a_recipe() -> None:
    with pytest.raises(SpecError, match="no RECIPE is given; only --train-only"):
        cli.run(rollout_only=True)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_train_only_ends_identical_and_on_a_changed_dump_diverged(
    lockstep: CommandLine, flipped: Ended, tmp_path: Path
) -> None:
    leg = lockstep.runs_dir / "flipped" / "a"
    ended = lockstep(
        *("run", "--train-only", str(dump_path(leg, 2)), "--run-id", "replayed", "--json")
    )
    assert ended.code == 0, ended
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["comparison"]["common_steps"]) == ("Identical", 1)
    assert [line.key for line in read_ledger(Path(found["folder"]) / "a").lines] == [
        (1, -1),
        (2, 0),
    ]
    # The lowest bit of one log-prob, in a copy of the leg.
    shutil.copytree(leg, tmp_path / "a", ignore=shutil.ignore_patterns("tensors"))
    dump = dump_path(tmp_path / "a", 1)
    content = json.loads(dump.read_text())
    sample = content["samples"][3]
    sample["logprobs"][0] = flip_float32(float.fromhex(sample["logprobs"][0]), 0).hex()
    dump.write_text(json.dumps(content))
    few = ("--set", "plan.num_steps=2", *SHORT)
    ended = lockstep(
        *("run", "tiny_cpu", "--train-only", str(dump), "--run-id", "changed", "--json", *few)
    )
    assert ended.code == 10, ended
    found = json.loads(ended.stdout)
    assert found["verdict"] == "Diverged"
    first = found["comparison"]["first"]
    place = (1, "rollout_logprobs", sample["request_id"], [0])
    assert (first["step"], first["probe"], first["name"], first["element"]) == place
