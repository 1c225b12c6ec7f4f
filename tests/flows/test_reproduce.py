"""A step that is run again from the nearest checkpoint says what a ledger of digests cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from engines import runs
from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.ledger import read_ledger
from engines.provenance.side_files import tensors_path
from flows.reproduce import Replay, between, outcome, replay, spec_for
from model_specs.errors import ArtifactError, SpecError
from model_specs.registry import load_recipe
from tasks.sides import Side
from tests.flows.command_line import SHORT, CommandLine, Ended
from tests.flows.made_checkpoints import write_meta
from tests.unit.provenance.test_diff import flip_tensor, write_leg

# What is decided without an engine.


def side(leg: Path) -> Side:
    return Side(name=leg.name, kind="leg", path=leg, label=f"r/{leg.name}")


def again(name: str, record: Path, folder: Path) -> Replay:
    found = compare_ledgers(record, folder)
    return Replay(side=name, label=name, start_step=0, folder=folder, against_record=found)


def put_together(a: Path, b: Path, *replays: Replay) -> dict[str, Any]:
    found = compare_ledgers(a, b)
    element = between((side(a), side(b)), replays, found, ())
    agree: Comparison = compare_ledgers(replays[0].folder, replays[1].folder)
    return dict(outcome(found, replays, element, agree))


@pytest.fixture
def legs(tmp_path: Path) -> tuple[Path, Path]:
    """Two legs without tensors whose gradients part at step 2."""
    flip = flip_tensor("grads", "layers.2.w", 3, 5)
    return (
        write_leg(tmp_path / "a", keep=False),
        write_leg(tmp_path / "b", keep=False, change=flip),
    )


def test_two_true_replays_name_element_values_and_distance(
    tmp_path: Path, legs: tuple[Path, Path]
) -> None:
    a, b = legs
    flip = flip_tensor("grads", "layers.2.w", 3, 5)
    replays = (
        again("a", a, write_leg(tmp_path / "ra", num_steps=2)),
        again("b", b, write_leg(tmp_path / "rb", num_steps=2, change=flip)),
    )
    assert [found.reproduces for found in replays] == [True, True]
    found = put_together(a, b, *replays)
    assert found["verdict"] == "Diverged"
    assert found["first"]["element"] == [1, 0]
    assert (found["first"]["hex_a"], found["first"]["hex_b"]) == ("0x40400000", "0x40400020")
    assert (found["first"]["ulp"], found["first"]["ulp_histogram"]) == (32, [[17, 32, 1]])
    assert "both sides reproduce their records" in found["headline"]
    assert not found["replays_agree"]


def test_a_record_that_does_not_come_out_again_is_a_finding(
    tmp_path: Path, legs: tuple[Path, Path]
) -> None:
    a, b = legs
    replays = (
        again("a", a, write_leg(tmp_path / "ra", num_steps=2)),
        again("b", b, write_leg(tmp_path / "rb", num_steps=2)),
    )
    found = put_together(a, b, *replays)
    assert found["first"]["element"] is None
    assert "only a reproduces its record; both replays are the same bits" in found["headline"]
    assert "does NOT reproduce its record: they part at step 2 update 0 grads layers.2.w" in str(
        replays[1]
    )


def test_kept_tensors_stand_for_a_record_that_does_not_come_out_again(
    tmp_path: Path, legs: tuple[Path, Path]
) -> None:
    a = legs[0]
    kept = write_leg(tmp_path / "kept", change=flip_tensor("grads", "layers.2.w", 3, 5))
    replays = (
        again("a", a, write_leg(tmp_path / "ra", num_steps=2)),
        again("b", kept, write_leg(tmp_path / "rb", num_steps=2)),
    )
    found = put_together(a, kept, *replays)
    assert found["first"]["ulp"] == 32
    assert "only a reproduces its record" in found["headline"]


def test_a_replay_begins_with_the_nearest_checkpoint_and_keeps_its_last_step(
    tmp_path: Path,
) -> None:
    leg = tmp_path / "run" / "a"
    for step in (2, 4):
        write_meta(leg / "checkpoints" / f"step-{step:06d}", step, state=f"s{step}")
    assert [runs.checkpoint_before(leg, step)[0] for step in (1, 2, 3, 4, 5)] == [0, 0, 2, 2, 4]
    assert runs.checkpoint_before(leg, 2)[1] is None
    spec = load_recipe("tiny_cpu")
    runs.write_spec(leg.parent, spec)
    again = spec_for(leg, 3)
    assert (again.plan.num_steps, again.plan.keep_tensor_steps) == (3, 1)
    assert again.model_copy(update={"plan": spec.plan}) == spec


def test_what_no_step_made_and_what_has_no_folder_cannot_be_run_again(tmp_path: Path) -> None:
    leg = write_leg(tmp_path / "a")
    with pytest.raises(SpecError, match="differs in the state that it begins with"):
        replay(side(leg), "a", 0)
    (tmp_path / "alone").mkdir()
    with pytest.raises(ArtifactError, match="its run folder is not here"):
        replay(side(tmp_path / "alone"), "b", 2)


# With engines.


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_flipped_leg_is_not_reproduced_and_the_other_one_is(
    lockstep: CommandLine, flipped: Ended
) -> None:
    folder = lockstep.runs_dir / "flipped"
    before = (folder / "b" / "ledger.jsonl").read_bytes()
    ended = lockstep("diff", "flipped", "--reproduce", "--json")
    assert ended.code == 10, ended
    found = json.loads(ended.stdout)
    assert [row["reproduces"] for row in found["replays"]] == [True, False]
    assert [row["start_step"] for row in found["replays"]] == [1, 1]
    parted = found["replays"][1]["against_record"]["first"]
    first = found["first"]
    assert (parted["step"], parted["probe"], parted["name"]) == (2, "grads", first["name"])
    assert found["replays_agree"]
    assert "only a reproduces its record; both replays are the same bits" in found["headline"]
    assert (first["element"], first["ulp"]) == ([0, 0], 1)
    assert (folder / "b" / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.exhaustive
def test_from_the_checkpoint_before_it_a_step_gives_the_element_that_no_record_kept(
    lockstep: CommandLine, flipped: Ended
) -> None:
    assert flipped.code == 10, flipped
    kept = lockstep.runs_dir / "flipped"
    shutil.copytree(
        kept, lockstep.runs_dir / "steady", ignore=shutil.ignore_patterns("b", "tensors")
    )
    fields = (
        *("plan.num_steps=2", "plan.checkpoint_every=1", "plan.keep_tensor_steps=0"),
        *("schedule.kind=wsd", "schedule.horizon_samples=96", "schedule.decay_samples=64"),
    )
    few = [part for field in fields for part in ("--set", field)]
    # The rate is that of the other until the end of step 1, with its 32 samples.
    ended = lockstep("run", "tiny_cpu", "--run-id", "decaying", *few, *SHORT)
    assert ended.code == 0, ended
    declared = ("steady/a", "decaying/a", "--across", "schedule", "--json")
    plain = json.loads(lockstep("diff", *declared).stdout)["first"]
    assert (plain["step"], plain["probe"], plain["element"]) == (2, "weights", None)
    ended = lockstep("diff", *declared, "--reproduce")
    assert ended.code == 10, ended
    found = json.loads(ended.stdout)
    assert [row["reproduces"] for row in found["replays"]] == [True, True]
    assert [row["start_step"] for row in found["replays"]] == [1, 1]
    for row in found["replays"]:
        lines = read_ledger(Path(row["folder"])).lines
        assert [line.key for line in lines] == [(1, -1), (2, 0)]
    first = found["first"]
    assert (first["step"], first["probe"], first["name"]) == (2, "weights", plain["name"])
    # What the copy left out has the very value at that element.
    tensors = load_file(tensors_path(kept / "a", 2, 0, "weights"))
    value = tensors[first["name"]][tuple(first["element"])]
    assert float(value) == first["value_a"] != first["value_b"]
    assert sum(count for _, _, count in first["ulp_histogram"]) == first["num_differing"] > 100


@pytest.mark.slow
@pytest.mark.exhaustive
def test_another_learning_rate_is_reproduced_on_both_sides_down_to_the_element(
    lockstep: CommandLine,
) -> None:
    few = ("--set", "plan.num_steps=3", "--set", "plan.checkpoint_every=1", *SHORT)
    few = (*few, "--set", "plan.keep_tensor_steps=0")
    for name, rate in (("fast", "5e-3"), ("slow", "1e-3")):
        ended = lockstep("run", "tiny_cpu", "--run-id", name, *few, "--set", f"optimizer.lr={rate}")
        assert ended.code == 0, ended
    declared = ("--across", "layout,trainer,optimizer.lr")
    plain = json.loads(lockstep("diff", "fast", "slow", *declared, "--json").stdout)
    assert (plain["first"]["step"], plain["first"]["probe"]) == (1, "weights")
    assert plain["first"]["element"] is None
    assert plain["completion"]["step"] == 2
    assert plain["completion"]["text_a"] != plain["completion"]["text_b"]
    ended = lockstep("diff", "fast", "slow", *declared, "--reproduce", "--json")
    assert ended.code == 10, ended
    found = json.loads(ended.stdout)
    assert [row["reproduces"] for row in found["replays"]] == [True, True]
    first = found["first"]
    assert (first["step"], first["probe"], first["name"]) == (1, "weights", plain["first"]["name"])
    assert first["value_a"] != first["value_b"]
    assert sum(count for _, _, count in first["ulp_histogram"]) == first["num_differing"] > 1000
    last = read_ledger(lockstep.runs_dir / "fast" / "a").last_step
    assert last == 3
