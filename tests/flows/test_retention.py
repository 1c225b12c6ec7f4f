"""Which checkpoints stay: the last ones, the marked ones, and the one an attempt went on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines import runs
from engines.checkpoint import retention
from engines.checkpoint.retention import (
    checkpoint_bytes,
    copy_bytes,
    disk_need,
    half_need,
    kept_steps,
    num_parameters,
    prune,
    require_disk,
)
from engines.contracts import StepRecord
from engines.loop import DrawnStep
from engines.provenance.digest import digest_floats
from engines.provenance.fence import RunFolder
from engines.provenance.ledger import LedgerHeader, LedgerWriter, read_ledger
from engines.rollout_dump import write_dump
from flows.dry import check
from model_specs.errors import CheckpointError, SpecError, StaleAttemptError
from model_specs.overrides import apply_overrides
from model_specs.run_spec import PlanSpec, RunSpec
from tasks import checkpoint, train
from tests.flows.conftest import Runner
from tests.flows.made_checkpoints import write_meta


def plan(**fields: int | None) -> PlanSpec:
    return PlanSpec(num_steps=100, checkpoint_every=1, **fields)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, {1, 2, 3, 4, 5, 6, 7}),
        ({"keep_last": 1}, {7}),
        ({"keep_last": 2}, {6, 7}),
        ({"keep_last": 1, "keep_every": 3}, {3, 6, 7}),
        ({"keep_last": 20}, {1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_the_last_ones_and_every_marked_one_are_kept(
    fields: dict[str, int], kept: set[int]
) -> None:
    assert kept_steps(range(1, 8), plan(**fields)) == kept


def test_marks_without_anything_that_is_deleted_are_refused(spec: RunSpec) -> None:
    with pytest.raises(SpecError, match=r"plan\.keep_every=2 .*plan\.keep_last"):
        apply_overrides(spec, ("plan.keep_every=2",))


def committed(leg: Path, *steps: int) -> None:
    for step in steps:
        folder = leg / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x")
        write_meta(folder, step, state=f"state {step}")


def test_neither_the_resumed_one_nor_a_later_one_is_deleted(tmp_path: Path) -> None:
    fence = RunFolder.create(tmp_path, run_id="r").new_attempt()
    leg = tmp_path / "a"
    committed(leg, 1, 2, 3, 4, 9)
    kept = plan(keep_last=1)
    assert prune(leg, kept, newest_step=4, protected={2}, fence=fence) == (1, 3)
    assert sorted(runs.checkpoints(leg)) == [2, 4, 9]


def test_the_newest_checkpoint_is_one_whose_step_the_ledger_has(tmp_path: Path) -> None:
    leg = tmp_path / "a"
    committed(leg, 2, 4, 8)
    assert runs.checkpoint_at(leg, None)[0] == 8  # no ledger says anything else
    header = LedgerHeader(trajectory="t", plan="p", run_id="r", leg="a")
    ledger = LedgerWriter(leg, header=header)
    chains = []
    for step in range(6):
        digests = {"weights": {"w": digest_floats("w", [float(step)])}}
        ledger.append(StepRecord(step=step, update=0 if step else -1, digests=digests))
        chains.append(read_ledger(leg).chain)
    for step in (2, 4):
        place = leg / "checkpoints" / f"step-{step:06d}"
        write_meta(place, step, state=f"state {step}", chain=chains[step])
    assert runs.checkpoint_at(leg, None)[0] == 4
    assert runs.checkpoint_at(leg, 8)[0] == 8  # named on purpose
    # One that an attempt left which had other bits in this step, and was taken back.
    write_meta(leg / "checkpoints" / "step-000004", 4, state="state 4", chain=chains[3])
    assert runs.checkpoint_at(leg, None)[0] == 2
    assert runs.checkpoint_before(leg, 6)[0] == 2
    with pytest.raises(CheckpointError, match=f"taken back: its chain is {chains[3]}, the ledger"):
        runs.checkpoint_at(leg, 4)


def test_a_fork_that_has_not_got_beyond_its_beginning_goes_on_from_there(tmp_path: Path) -> None:
    leg = tmp_path / "a"
    committed(leg, 4)
    LedgerWriter(
        leg, header=LedgerHeader(trajectory="t", plan="p", run_id="r", leg="a", start_step=4)
    )
    assert runs.checkpoint_at(leg, None)[0] == 4


def test_a_copy_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    fence = RunFolder.create(tmp_path, run_id="r").new_attempt()
    leg = tmp_path / "a"
    committed(leg, 2, 4)
    for name in ("step-000004-backup", "step-4", "step-000009"):
        shutil.copytree(leg / "checkpoints" / "step-000004", leg / "checkpoints" / name)
    found = runs.checkpoints(leg)
    assert [Path(each.uri).name for each in found.values()] == ["step-000002", "step-000004"]
    assert prune(leg, plan(keep_last=1), newest_step=4, protected=(), fence=fence) == (2,)
    assert (leg / "checkpoints" / "step-000004-backup").is_dir()


def test_a_stale_attempt_deletes_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, run_id="r")
    stale = folder.new_attempt()
    folder.new_attempt()
    committed(tmp_path / "a", 1, 2)
    with pytest.raises(StaleAttemptError):
        prune(tmp_path / "a", plan(keep_last=1), newest_step=2, protected=(), fence=stale)
    assert sorted(runs.checkpoints(tmp_path / "a")) == [1, 2]


def test_a_crash_while_deleting_leaves_what_counts_as_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = RunFolder.create(tmp_path, run_id="r").new_attempt()
    committed(tmp_path / "a", 1, 2)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt(path)

    monkeypatch.setattr(retention.shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path / "a", plan(keep_last=1), newest_step=2, protected=(), fence=fence)
    assert (tmp_path / "a" / "checkpoints" / "step-000001" / "data").is_file()
    assert sorted(runs.checkpoints(tmp_path / "a")) == [2]


def test_a_replaced_or_unfinished_folder_is_no_checkpoint(tmp_path: Path) -> None:
    fence = RunFolder.create(tmp_path, run_id="r").new_attempt()
    committed(tmp_path / "a", 1, 2)
    folder = tmp_path / "a" / "checkpoints"
    for suffix in (".replaced", ".partial"):
        shutil.copytree(folder / "step-000002", folder / f"step-000002{suffix}")
    found = runs.checkpoints(tmp_path / "a")
    assert [Path(found[step].uri).name for step in sorted(found)] == ["step-000001", "step-000002"]
    assert prune(tmp_path / "a", plan(), newest_step=2, protected=(), fence=fence) == ()


@pytest.mark.parametrize(
    ("overrides", "start", "most"),
    [
        ((), 0, 2),  # steps 4 and 8
        (("plan.checkpoint_every=1",), 0, 8),
        (("plan.checkpoint_every=1", "plan.keep_last=2"), 0, 3),
        (("plan.checkpoint_every=1", "plan.keep_last=1", "plan.keep_every=2"), 0, 5),
        (("plan.checkpoint_every=1", "plan.keep_last=1"), 4, 2),
    ],
)
def test_the_need_counts_what_is_there_at_once(
    spec: RunSpec, overrides: tuple[str, ...], start: int, most: int
) -> None:
    need = disk_need(apply_overrides(spec, overrides), start_step=start)
    assert need.num_checkpoints == most
    # A leg that goes on has the copies of the model already.
    assert (need.bytes_of_copies > 0) == (start == 0)
    assert need.total == most * checkpoint_bytes(spec.model) + need.bytes_of_copies
    assert f"{most} checkpoints of" in str(need)


def test_a_run_that_cannot_fit_is_refused_with_both_values(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = disk_need(spec, start_step=0, num_legs=2)
    usage = shutil.disk_usage(tmp_path)
    require_disk(need, tmp_path / "not yet" / "there")
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    mib = need.total / 2**20
    with pytest.raises(SpecError, match=rf"needs {mib:.1f} MiB .* 1\.0 MiB free.*plan\.keep_last"):
        require_disk(need, tmp_path)


def test_the_refusal_comes_before_a_run_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.halves import rollout_only, train_only
    from flows.run_request import Request, TrainOnlyRequest, TrainRequest
    from flows.train import train as train_flow

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    check("tiny_cpu", (), None)
    runs_dir = str(tmp_path / "runs")
    with pytest.raises(SpecError, match="MiB free"):
        train_flow.fn(TrainRequest(recipe="tiny_cpu"), runs_dir=runs_dir)
    with pytest.raises(SpecError, match="MiB free"):
        rollout_only.fn(Request(recipe="tiny_cpu"), runs_dir=runs_dir)
    drawn = DrawnStep(
        step=1, prompts=(), samples=(), rewards=(), advantages=(), groups_with_variance=0
    )
    dump = write_dump(tmp_path / "a", drawn, trajectory="t")
    with pytest.raises(SpecError, match="MiB free"):
        train_only.fn(TrainOnlyRequest(recipe="tiny_cpu", dump=str(dump)), runs_dir=runs_dir)
    assert not (tmp_path / "runs").exists()


def test_half_of_a_run_needs_no_checkpoints(spec: RunSpec) -> None:
    drawn, trained = (half_need(spec, trained_steps=steps) for steps in (0, 2))
    assert drawn.total == copy_bytes(spec, num_steps=0)
    assert trained.total == copy_bytes(spec, num_steps=2) > drawn.total


def test_copies_and_kept_tensors_are_counted_by_their_dtypes(spec: RunSpec) -> None:
    parameters = num_parameters(spec.model)

    def per_parameter(*overrides: str, num_steps: int = 8) -> float:
        return copy_bytes(apply_overrides(spec, overrides), num_steps=num_steps) / parameters

    # bfloat16 as it came and as it is exported, float32 converted.
    assert per_parameter("plan.keep_tensor_steps=0") == 2 + 4 + 2
    assert per_parameter("plan.keep_tensor_steps=3") == 8 + 3 * (4 + 8 + 4 + 2 + 2)
    assert per_parameter("plan.keep_tensor_steps=3", num_steps=2) == 8 + 2 * 20
    wide = ("plan.keep_tensor_steps=1", "numerics.compute_dtype=float32")
    assert per_parameter(*wide) == 2 + 4 + 4 + 16 + 8


@pytest.mark.slow
def test_real_checkpoints_are_pruned_and_as_large_as_was_estimated(runner: Runner) -> None:
    with runner.leg("plan.keep_last=1", "plan.keep_every=3") as sibling:
        state, present = runner.weights, []
        for step in range(1, 5):
            segment = train.train_segment.fn(sibling.name, state, start_step=step - 1, to_step=step)
            state = checkpoint.checkpoint.fn(sibling.name, segment)
            present.append(sorted(runs.checkpoints(sibling.folder)))
        size = sum(file.stat().st_size for file in Path(state.uri).rglob("*") if file.is_file())
        estimate = checkpoint_bytes(sibling.spec.model)
    assert present == [[1], [2], [3], [3, 4]]
    # The rest is the format's own: names, offsets, padding.
    assert estimate < size < 1.2 * estimate
