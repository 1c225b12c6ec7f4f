"""Laws of what stands beside a first difference, and of comparing locks and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.checkpoint.dcp import CheckpointMeta, DcpStorage, write_checkpoint
from engines.checkpoint.state_diff import compare_checkpoints
from engines.contracts import StepRecord
from engines.faults import flip_bit
from engines.provenance.completion_diff import common_prefix
from engines.provenance.diff import compare_ledgers
from engines.provenance.element_diff import diff_elements, elements_of, histogram, ulp_distance
from engines.provenance.ledger import LedgerHeader, LedgerWriter
from engines.provenance.lock import LockRow, append_row
from engines.provenance.lock_diff import compare_locks
from engines.provenance.side_files import drop_old_tensors
from engines.provenance.verdict import Verdict
from flows.difference import completion_lines, histogram_lines
from model_specs.errors import ArtifactError, CheckpointError
from model_specs.fingerprint import MISSING, trajectory_fingerprint
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tests.unit.provenance.test_diff import flip_tensor, write_leg

# How far apart.


@given(st.lists(st.integers(1, 2**64 - 1), max_size=40))
def test_a_histogram_counts_each_distance_in_its_power_of_two(distances: list[int]) -> None:
    found = histogram(np.array(distances, np.uint64))
    expected: dict[tuple[int, int], int] = {}
    for distance in distances:
        power = (distance - 1).bit_length()
        bucket = (2 ** (power - 1) + 1 if power else 1, 2**power)
        assert bucket[0] <= distance <= bucket[1]
        expected[bucket] = expected.get(bucket, 0) + 1
    assert {(low, high): count for low, high, count in found} == expected
    assert [low for low, _, _ in found] == sorted(low for low, _, _ in found)


def test_the_histogram_is_that_of_all_differing_elements_but_nan() -> None:
    a = [1.0, 1.0, 1.0, 1.0, float("nan"), 5.0]
    b = [float(np.nextafter(np.float32(1), np.float32(2))), 1.5, 1.0, -1.0, 0.0, 5.0]
    found = diff_elements(elements_of(a), elements_of(b))
    assert found is not None
    distances = [ulp_distance(x, y) for x, y in zip(a[:4], b[:4], strict=True) if x != y]
    assert (found.num_differing, found.max_ulp) == (4, max(d for d in distances if d))
    assert sum(count for _, _, count in found.ulp_histogram) == 3
    assert found.ulp_histogram[0] == (1, 1, 1)
    integers = diff_elements(elements_of([1, 2]), elements_of([1, 3]))
    assert integers is not None
    assert integers.ulp_histogram == ()
    assert histogram_lines(found.ulp_histogram)[1].split()[:2] == ["1", "1"]
    assert histogram_lines(((1, 1, 1),)) == []


# The first completion.


def table(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the samples' texts, as a leg does."""
    rows = [
        {"request_id": name, "prompt": "1 + 1 =", "completion": text}
        for name, text in texts.items()
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_first_completion_is_found_where_it_is_a_consequence(tmp_path: Path) -> None:
    def change(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            flip_bit(tensors["grads"]["layers.2.w"], 0, 0)
        if step == 2:
            values["tokens"]["2/p10/0"] = [3, 99, 7]

    a, b = write_leg(tmp_path / "a"), write_leg(tmp_path / "b", change=change)
    table(a, {"2/p2/0": "four", "2/p10/0": "it is 2"})
    table(b, {"2/p2/0": "four", "2/p10/0": "it was 2"})
    found = compare_ledgers(a, b)
    assert found.first is not None
    assert (found.first.step, found.first.probe) == (1, "grads")
    completion = found.completion
    assert completion is not None
    assert (completion.step, completion.request_id, completion.position) == (2, "2/p10/0", 1)
    assert (completion.tokens_a, completion.tokens_b) == ((3, 15), (3, 99, 7))
    assert (completion.prompt, completion.text_a, completion.text_b) == (
        "1 + 1 =",
        "it is 2",
        "it was 2",
    )
    assert completion.common_text == len("it ")
    assert json.loads(json.dumps(found.to_dict()))["completion"]["tokens_b"] == [3, 99, 7]
    lines = completion_lines(found.to_dict()["completion"])
    assert "token 1" in lines[0]
    assert "'it >i<s 2'" in lines[1]
    assert "tokens 3 >99< 7 (3 in all)" in lines[4]


def test_there_is_no_completion_where_no_token_differs_and_no_text_without_a_table(
    tmp_path: Path,
) -> None:
    a = write_leg(tmp_path / "a")
    b = write_leg(tmp_path / "b", change=flip_tensor("grads", "layers.2.w", 0, 0))
    assert compare_ledgers(a, b).completion is None

    def shorter(step: int, values: dict[str, Any], tensors: dict[str, Any]) -> None:
        if step == 1:
            values["tokens"]["1/p2/0"] = [3]

    found = compare_ledgers(a, write_leg(tmp_path / "c", change=shorter)).completion
    assert found is not None
    assert (found.position, found.text_a, found.text_b) == (1, "", "")
    assert common_prefix("abc", "abx") == 2
    assert common_prefix("", "a") == 0


# What went in.


def test_only_what_differs_is_listed_and_across_still_finds_the_first_probe(
    tmp_path: Path,
) -> None:
    spec = load_recipe("tiny_cpu")
    values = spec.model_dump(mode="json")
    values["optimizer"]["lr"] = 0.125
    values["trainer"] = "megatron"
    values["reduction"]["slots"] = 8
    values["plan"]["num_steps"] = 3
    values["execution"]["rollout_engines"] = 2
    other = RunSpec.model_validate(values)
    a = write_leg(tmp_path / "r1" / "a", trajectory=trajectory_fingerprint(spec))
    b = write_leg(
        tmp_path / "r2" / "a",
        trajectory=trajectory_fingerprint(other),
        change=flip_tensor("optimizer", "layers.2.w", 0, 0),
    )
    for folder, each in ((a, spec), (b, other)):
        (folder.parent / "spec.json").write_text(each.model_dump_json())
    assert compare_ledgers(a, b, across=("layout", "trainer")).verdict is Verdict.INCOMPARABLE
    found = compare_ledgers(a, b, across=("layout", "trainer", "optimizer.lr"))
    assert found.first is not None
    assert found.first.place == "step 2 update 0 optimizer layers.2.w"
    assert [field for field, _, _ in found.identity_differences] == [
        "optimizer.lr",
        "reduction.slots",
        "trainer",
    ]
    assert found.plan_differences == (("plan.num_steps", 8, 3),)
    assert found.execution_differences == (("execution.rollout_engines", 1, 2),)


def test_specs_that_this_version_does_not_take_are_compared_all_the_same(tmp_path: Path) -> None:
    spec = load_recipe("tiny_cpu")
    values = spec.model_dump(mode="json")
    values["execution"]["gone"] = 3
    values["plan"]["gone"] = values.pop("trainer_options")
    a, b = write_leg(tmp_path / "r1" / "a"), write_leg(tmp_path / "r2" / "a")
    (a.parent / "spec.json").write_text(json.dumps(values))
    (b.parent / "spec.json").write_text(spec.model_dump_json())
    found = compare_ledgers(a, b)
    assert (found.verdict, found.identity_differences) == (Verdict.IDENTICAL, ())
    assert ("plan.gone.lora", False, MISSING) in found.plan_differences
    assert found.execution_differences[0] == ("execution.gone", 3, MISSING)
    assert ("trainer_options.lora", MISSING, False) in found.execution_differences

    values["optimizer"]["gone"] = 0.5
    values["schema_version"] = 0
    (a.parent / "spec.json").write_text(json.dumps(values))
    c = write_leg(tmp_path / "r2" / "c", trajectory="another")
    found = compare_ledgers(a, c)
    assert found.verdict is Verdict.INCOMPARABLE
    assert found.identity_differences == (
        ("optimizer.gone", 0.5, MISSING),
        ("schema_version", 0, 1),
    )
    declared = compare_ledgers(a, c, across=("optimizer.gone", "schema_version"))
    assert declared.verdict is Verdict.IDENTICAL


def test_with_the_ledger_alone_the_probe_is_found_and_the_rest_is_said_to_be_elsewhere(
    tmp_path: Path,
) -> None:
    a = write_leg(tmp_path / "a")
    b = write_leg(tmp_path / "b", change=flip_tensor("grads", "layers.2.w", 0, 0))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "ledger.jsonl").write_bytes((b / "ledger.jsonl").read_bytes())
    first = compare_ledgers(a, alone).first
    assert first is not None
    assert (first.step, first.probe, first.name) == (2, "grads", None)
    assert f"only the ledger is in {alone}" in first.detail


def test_steps_are_counted_from_where_the_later_leg_begins(tmp_path: Path) -> None:
    legs = []
    for start in (0, 2):
        header = LedgerHeader(trajectory="t", plan="p", run_id="r", leg="a", start_step=start)
        ledger = LedgerWriter(tmp_path / str(start), header=header)
        for step in range(start, 5):
            update = -1 if step == start else 0
            digests = {"weights": {"w": f"{step:032x}"}}
            ledger.append(StepRecord(step=step, update=update, digests=digests))
        legs.append(ledger.folder)
    found = compare_ledgers(*legs)
    assert (found.verdict, found.start_step, found.common_steps) == (Verdict.IDENTICAL, 2, 2)


# Locks.


def write_lock(folder: Path, *rows: tuple[str, dict[str, str], dict[str, str]]) -> Path:
    """Write a lock of (stage, inputs, outputs)."""
    folder.mkdir()
    for number, (stage, inputs, outputs) in enumerate(rows):
        row = LockRow(
            stage=stage,
            version=1,
            inputs=inputs,
            outputs=outputs,
            trajectory="t",
            attempt=number,
            cached=False,
            environment=folder.name,
            ambient={"seconds": number},
        )
        append_row(folder, row)
    return folder


STAGES = (
    ("download", {}, {"model": "m", "data": "d"}),
    ("convert", {"model": "m"}, {"dcp": "0"}),
    ("train", {"dcp": "0"}, {}),
    ("checkpoint", {}, {"checkpoint": "4"}),
    ("train", {"checkpoint": "4"}, {}),
    ("checkpoint", {}, {"checkpoint": "8"}),
)


def test_a_resumed_leg_has_the_lock_of_one_that_ran_through(tmp_path: Path) -> None:
    whole = write_lock(tmp_path / "whole", *STAGES)
    resumed = write_lock(tmp_path / "resumed", *STAGES[:4], *STAGES[:2], *STAGES[4:])
    found = compare_locks(whole, resumed / "lock.json")
    assert (found.verdict, found.stages, found.digests) == (Verdict.IDENTICAL, 6, 8)
    assert found.environment_differences[0] == ("download", "whole", "resumed")
    assert found.headline == "6 stages, 8 digests equal"


@pytest.mark.parametrize(
    ("at", "row", "said"),
    [
        (1, ("convert", {"model": "m"}, {"dcp": "1"}), "stage convert, output dcp: 0 | 1"),
        (1, ("convert", {"model": "n"}, {"dcp": "0"}), "stage convert, input model: m | n"),
        (5, ("checkpoint", {}, {"checkpoint": "9"}), "stage checkpoint#2, output checkpoint: 8"),
        (5, None, "stage checkpoint#2, row: there | absent"),
        (3, ("checkpoint", {}, {"x": "4"}), "stage checkpoint, output checkpoint: 4 | None"),
    ],
)
def test_the_first_stage_that_differs_is_named(
    tmp_path: Path, at: int, row: tuple[str, dict[str, str], dict[str, str]] | None, said: str
) -> None:
    a = write_lock(tmp_path / "a", *STAGES)
    changed = [*STAGES[:at], *([row] if row else []), *STAGES[at + 1 :]]
    found = compare_locks(a, write_lock(tmp_path / "b", *changed))
    assert found.verdict is Verdict.DIVERGED
    assert said in found.headline
    assert found.to_dict()["first"]["stage"] == said.split(",")[0].removeprefix("stage ")


def test_locks_of_other_trajectories_or_without_digests_are_not_called_equal(
    tmp_path: Path,
) -> None:
    a = write_lock(tmp_path / "a", *STAGES)
    b = write_lock(tmp_path / "b", *STAGES)
    text = (b / "lock.json").read_text()
    (b / "lock.json").write_text(text.replace('"trajectory": "t"', '"trajectory": "u"'))
    assert compare_locks(a, b).verdict is Verdict.INCOMPARABLE
    assert compare_locks(a, b, across=("optimizer.lr",)).verdict is Verdict.IDENTICAL
    empty = [write_lock(tmp_path / name, ("train", {}, {})) for name in ("c", "d")]
    assert compare_locks(*empty).verdict is Verdict.VACUOUS
    with pytest.raises(ArtifactError, match=r"no lock\.json"):
        compare_locks(a, tmp_path)


# Checkpoints.


def write_state(folder: Path, *, digest: str, **changes: torch.Tensor) -> Path:
    """Write a checkpoint of two tensors, their moments and the progress."""
    names = ("layers.2.w", "layers.10.w")
    tensors = {
        f"{kind}.{name}": torch.full((2, 3), value)
        for value, kind in ((1.0, "model"), (0.0, "optimizer.exp_avg"))
        for name in names
    } | {"progress.step": torch.tensor(4)}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    meta = CheckpointMeta(
        trajectory="t",
        step=4,
        updates=4,
        samples_consumed=128,
        state_digest=digest,
        chain_digest="c",
        attempt=1,
    )
    write_checkpoint(folder, tensors, meta=meta)
    return folder


def test_checkpoints_are_equal_or_differ_at_their_first_element(tmp_path: Path) -> None:
    other = torch.full((2, 3), 1.0)
    flip_bit(other, 4, 1)
    a = write_state(tmp_path / "a", digest="s")
    assert compare_checkpoints(a, write_state(tmp_path / "b", digest="s")).headline == (
        "5 tensors equal, state digest s"
    )
    moved = torch.full((2, 3), 0.5)
    changes = {"optimizer__exp_avg__layers__2__w": moved, "model__layers__10__w": other}
    found = compare_checkpoints(a, write_state(tmp_path / "c", digest="u", **changes))
    assert found.verdict is Verdict.DIVERGED
    first = found.first
    assert first is not None
    assert (first.step, first.probe, first.name) == (4, "weights", "layers.10.w")
    assert (first.element, first.ulp, first.num_differing) == ((1, 1), 2, 1)
    assert first.ulp_histogram == ((2, 2, 1),)
    assert "2 of 5 tensors differ" in first.detail
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == "Diverged"


def test_a_converted_state_is_compared_and_a_digest_that_lies_is_an_error(tmp_path: Path) -> None:
    a = write_state(tmp_path / "a", digest="s")
    with pytest.raises(CheckpointError, match="a meta is not that of its tensors"):
        compare_checkpoints(a, write_state(tmp_path / "b", digest="u"))
    changed = write_state(tmp_path / "c", digest="s", progress__step=torch.tensor(5))
    with pytest.raises(CheckpointError, match=r"differ at .*progress step.* 4 .* 5"):
        compare_checkpoints(a, changed)
    bare = tmp_path / "bare"
    DcpStorage().write(bare, {"model.layers.2.w": torch.ones(2, 3)})
    found = compare_checkpoints(a, bare)
    assert found.first is not None
    assert "only a has this tensor; 4 of 5 tensors differ" in found.first.detail
    same = compare_checkpoints(bare, bare)
    assert (same.verdict, same.tensors) == (Verdict.IDENTICAL, 1)
    with pytest.raises(CheckpointError, match="cannot be compared"):
        compare_checkpoints(a, tmp_path / "nowhere")


# What is kept.


def test_kept_tensors_are_a_ring_of_the_last_steps(tmp_path: Path) -> None:
    leg = write_leg(tmp_path / "a", num_steps=5)
    drop_old_tensors(leg, 5 - 2)
    kept = sorted(path.name for path in (leg / "tensors").iterdir())
    assert kept == ["step-000004-0", "step-000005-0"]
    assert len(list((leg / "digests").iterdir())) == 6
    drop_old_tensors(tmp_path, 3)  # a leg that keeps none
