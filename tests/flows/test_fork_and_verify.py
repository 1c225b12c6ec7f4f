"""Forks begin with their parent's state and say so; a segment that is run again is the ledger's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines import runs
from engines.checkpoint.adoption import adopt_checkpoint
from engines.checkpoint.dcp import read_meta
from engines.checkpoint.download import download_data, download_model
from engines.contracts import StepRecord
from engines.plan import segment_bounds
from engines.provenance.diff import compare_ledgers
from engines.provenance.digest import digest_floats
from engines.provenance.fence import RunFolder
from engines.provenance.ledger import (
    LedgerHeader,
    LedgerLine,
    LedgerWriter,
    read_ledger,
    verify_ledger,
)
from engines.provenance.side_files import read_digests
from engines.provenance.verdict import Verdict
from engines.rollout_dump import dump_path
from flows.fork import forked
from flows.verify import own_inputs, segment_cost
from model_specs.errors import ArtifactError, CheckpointError, EngineError, SpecError
from model_specs.fingerprint import spec_differences, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.run_spec import ForkOrigin, PlanSpec, RunSpec
from tests.flows.command_line import SHORT, CommandLine, Ended
from tests.flows.made_checkpoints import write_meta

PARENT = "parent"
FLIP = "step=3,probe=grads"


@pytest.fixture(scope="module")
def parent(lockstep: CommandLine) -> Path:
    """Two legs of four steps with a checkpoint every second one; leg b has one bit flipped."""
    few = ("--set", "plan.num_steps=4", "--set", "plan.checkpoint_every=2")
    ended = lockstep(
        *("run", "tiny_cpu", "--twin", "--inject-flip", FLIP, "--run-id", PARENT), *few, *SHORT
    )
    assert ended.code == 10, ended
    return lockstep.runs_dir / PARENT


@pytest.fixture(scope="module")
def same(lockstep: CommandLine, parent: Path) -> Path:
    """A fork at step 2 that changes nothing but dumps its rollouts."""
    dumps = ("--set", "plan.dump_rollouts=true")
    ended = lockstep("fork", f"{parent.name}@2", "--run-id", "same", *dumps)
    assert ended.code == 0, ended
    return lockstep.runs_dir / "same"


@pytest.fixture(scope="module")
def slower(lockstep: CommandLine, same: Path) -> Path:
    """A fork of the fork, at its end and with another learning rate."""
    changed = ("--set", "optimizer.lr=1e-3", "--set", "plan.num_steps=5")
    ended = lockstep("fork", f"{same.name}@4", "--run-id", "slower", *changed)
    assert ended.code == 0, ended
    return lockstep.runs_dir / "slower"


def update(folder: Path, step: int, number: int = 0) -> LedgerLine:
    return next(line for line in read_ledger(folder).lines if line.key == (step, number))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_that_changes_nothing_goes_on_as_its_parent(parent: Path, same: Path) -> None:
    undeclared = compare_ledgers(parent / "a", same / "a")
    assert undeclared.verdict is Verdict.INCOMPARABLE
    assert {field for field, _, _ in undeclared.identity_differences} == {
        "origin.state_digest",
        "origin.step",
    }
    found = compare_ledgers(parent / "a", same / "a", across=("origin",), verify=True)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 2)
    assert "compared from step 3 on" in found.note


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_first_line_of_a_fork_records_the_state_it_begins_with(
    parent: Path, same: Path
) -> None:
    ledger = verify_ledger(same / "a")
    assert [line.key for line in ledger.lines] == [(2, -1), (3, 0), (4, 0)]
    first, last = ledger.lines[0], update(parent / "a", 2)
    for probe in ("weights", "sent", "received"):
        assert first.roots[probe] == last.roots[probe]
    origin = runs.read_spec(same).origin
    assert origin is not None
    assert (origin.run, origin.leg, origin.step) == (PARENT, "a", 2)
    assert origin.chain_digest == last.chain
    assert origin.state_digest == runs.checkpoints(parent / "a")[2].digest
    assert read_digests(same / "a", 2, -1)["optimizer"] == {"state": origin.state_digest}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_has_its_own_checkpoint_of_the_state_it_begins_with(
    parent: Path, same: Path
) -> None:
    theirs, ours = (runs.checkpoints(folder / "a")[2] for folder in (parent, same))
    assert ours.digest == theirs.digest
    meta = read_meta(ours.uri, trajectory=trajectory_fingerprint(runs.read_spec(same)))
    assert meta.trajectory != read_meta(theirs.uri).trajectory


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_of_a_fork_may_change_the_trajectory(same: Path, slower: Path) -> None:
    spec = runs.read_spec(slower)
    assert spec.origin is not None
    assert (spec.origin.run, spec.origin.step) == ("same", 4)
    assert spec.optimizer.lr == 1e-3
    assert [line.key for line in verify_ledger(slower / "a").lines] == [(4, -1), (5, 0)]
    assert update(slower / "a", 5).metrics["train/lr"] == 1e-3
    begun, ended = update(slower / "a", 4, -1), update(same / "a", 4)
    assert begun.roots["weights"] == ended.roots["weights"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_is_shown_with_its_parent(lockstep: CommandLine, same: Path) -> None:
    shown = lockstep("show", same.name)
    assert shown.code == 0, shown
    assert f"forked from   {PARENT}/a@2" in shown.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_can_be_resumed_from_the_state_it_began_with(
    lockstep: CommandLine, same: Path
) -> None:
    before = [line.chain for line in read_ledger(same / "a").lines]
    ended = lockstep("resume", f"{same.name}@2", "--set", "plan.num_steps=3")
    assert ended.code == 0, ended
    assert [line.chain for line in verify_ledger(same / "a").lines] == before[:2]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_dumped_step_of_a_fork_is_trained_again(lockstep: CommandLine, same: Path) -> None:
    dump = dump_path(same / "a", 3)
    ended = lockstep("run", "--train-only", str(dump), "--run-id", "same-again")
    assert ended.code == 0, ended
    assert "\nIdentical\n" in ended.stdout
    again = verify_ledger(lockstep.runs_dir / "same-again" / "a")
    assert [line.key for line in again.lines] == [(2, -1), (3, 0)]
    assert again.lines[-1].roots["weights"] == update(same / "a", 3).roots["weights"]
    # No recipe has the fork's origin, so its checkpoint is another trajectory's.
    few = ("--set", "plan.num_steps=4", *SHORT)
    refused = lockstep("run", "tiny_cpu", "--train-only", str(dump), "--run-id", "no-origin", *few)
    assert refused.code == CheckpointError.exit_code, refused
    assert "belongs to trajectory" in refused.stderr


@pytest.fixture(scope="module")
def verified(lockstep: CommandLine, parent: Path) -> Ended:
    return lockstep("verify", parent.name, "--segment", "2")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_segment_that_is_run_again_is_identical_and_its_cost_is_stated(
    lockstep: CommandLine, parent: Path, verified: Ended
) -> None:
    assert verified.code == 0, verified
    assert "\nIdentical\n" in verified.stdout
    assert "segment 2 (steps 3 to 4), cost " in verified.stdout
    (scratch,) = (parent / "verify").glob("*-segment-2")
    found = json.loads((scratch / "verdict.json").read_text())
    assert found["comparison"]["common_steps"] == 2
    assert found["cost"]["steps"] == 2
    assert 0 < found["cost"]["segment_seconds_in_run"] < found["cost"]["seconds"]
    assert 0 < found["cost"]["share_of_run"] < 1
    assert runs.legs(parent) == ("a", "b")
    for name in ("model", "data"):
        manifest = json.loads((scratch / "a" / name / "manifest.json").read_text())
        assert manifest["source"] == str((parent / "a" / name).resolve())


@pytest.mark.slow
def test_the_second_segment_of_a_short_run_is_identical(
    lockstep: CommandLine, flipped: Ended
) -> None:
    assert flipped.code == 10, flipped
    ended = lockstep("verify", "flipped", "--segment", "2", "--json")
    assert ended.code == 0, ended
    found = json.loads(ended.stdout)
    assert (found["verdict"], found["comparison"]["common_steps"]) == ("Identical", 1)
    assert found["cost"]["steps"] == 1


def test_a_segment_reads_the_legs_own_copies_and_another_content_is_refused(
    spec: RunSpec, tmp_path: Path
) -> None:
    assert own_inputs(spec, tmp_path) == spec  # no copy is there
    made = download_model(spec.model, tmp_path / "model")
    data = download_data(spec.data, tmp_path / "data")
    known = spec.model.model_copy(update={"weights_digest": made.weights_digest})
    recorded = spec.model_copy(
        update={
            "model": known.model_copy(update={"path": "/gone"}),
            "data": spec.data.model_copy(update={"source": "/gone", "digest": data.digest}),
        }
    )
    found = own_inputs(recorded, tmp_path)
    assert trajectory_fingerprint(found) == trajectory_fingerprint(recorded)
    again = download_model(found.model, tmp_path / "scratch" / "model")
    assert again.weights_digest == made.weights_digest
    assert download_data(found.data, tmp_path / "scratch" / "data").digest == data.digest
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match=r"model\.weights_digest is .* in the spec but"):
        download_model(found.model, tmp_path / "again" / "model")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_segment_with_a_flipped_bit_is_diverged_at_that_bit(
    lockstep: CommandLine, parent: Path
) -> None:
    ended = lockstep("verify", parent.name, "--segment", "2", "--leg", "b")
    assert ended.code == 10, ended
    assert "\nDiverged\n" in ended.stdout
    assert "first difference at step 3 update 0 grads" in ended.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_is_exported_by_its_step(lockstep: CommandLine, parent: Path) -> None:
    out = lockstep.runs_dir / "exported"
    ended = lockstep("export", f"{parent.name}@2", "--out", str(out), "--json")
    assert ended.code == 0, ended
    found = json.loads(ended.stdout)
    assert (found["step"], found["folder"]) == (2, str(out))
    assert (out / "config.json").is_file()
    assert found["state_digest"] == runs.checkpoints(parent / "a")[2].digest
    # What was exported is what the rollout engine held after that step.
    assert found["digest"] == update(parent / "a", 2).roots["sent"]
    again = lockstep("export", f"{parent.name}@2", "--out", str(out))
    assert again.code == 2, again
    assert "is there already" in again.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fork_that_cannot_be_meant_is_refused_before_a_run_exists(
    lockstep: CommandLine, parent: Path
) -> None:
    with pytest.raises(SpecError, match=r"plan\.num_steps=4, but the run begins after step 4"):
        forked(parent, 4, (), leg="a")
    with pytest.raises(SpecError, match=r"model cannot change.*model\.num_layers: 2 -> 3"):
        forked(parent, 2, ("model.num_layers=3",), leg="a")
    with pytest.raises(CheckpointError, match=r"step 3; it has \[2, 4\]"):
        forked(parent, 3, (), leg="a")
    ended = lockstep("fork", f"{parent.name}@4", "--run-id", "refused-fork")
    assert ended.code == 2, ended
    assert not (lockstep.runs_dir / "refused-fork").exists()


ORIGIN = ForkOrigin(
    step=2, state_digest="s", run="r", leg="a", chain_digest="c", checkpoint="/somewhere"
)


def test_the_state_a_fork_begins_with_is_identity_and_its_place_is_not(spec: RunSpec) -> None:
    def with_origin(**changes: object) -> RunSpec:
        return spec.model_copy(update={"origin": ORIGIN.model_copy(update=changes)})

    begun = with_origin()
    assert trajectory_fingerprint(begun) != trajectory_fingerprint(spec)
    assert spec_differences(begun, with_origin(run="other", checkpoint="/elsewhere")) == ()
    assert spec_differences(begun, with_origin(state_digest="t")) == (
        ("origin.state_digest", "s", "t"),
    )
    assert apply_overrides(begun, ("optimizer.lr=1e-3",)).origin == ORIGIN


SAMPLING = {"max_new_tokens": 4}


def written_checkpoint(folder: Path, spec: RunSpec | None = None) -> Path:
    """A committed checkpoint of step 2, of a run of this spec or of one that is called `parent`."""
    trajectory = "parent" if spec is None else trajectory_fingerprint(spec)
    write_meta(folder, 2, state="s", trajectory=trajectory)
    (folder / "data").write_bytes(b"tensors")
    return folder


def test_a_fork_with_other_data_keeps_no_digest_of_what_follows_it(
    spec: RunSpec, tmp_path: Path
) -> None:
    sets = [
        {"name": name, "source": source, "digest": name, "every": 1, "sampling": SAMPLING}
        for name, source in (("follows", None), ("own", "/mine"))
    ]
    recorded = apply_overrides(spec, ("data.digest=old", f"plan.evals={json.dumps(sets)}"))
    parent = runs.new_run(recorded, tmp_path, run_id="parent").folder
    written_checkpoint(parent / "a" / "checkpoints" / "step-000002", recorded)

    def digests(*overrides: str) -> tuple[str | None, ...]:
        found = forked(parent, 2, overrides, leg="a")
        return (found.data.digest, *(chosen.digest for chosen in found.plan.evals))

    assert digests("optimizer.lr=1e-3") == ("old", "follows", "own")
    assert digests("data.source=/other") == (None, None, "own")
    assert digests("data.source=/other", "data.digest=new") == ("new", None, "own")
    assert digests("data.split=test") == (None, "follows", "own")  # a set has its own split
    again = f"plan.evals={json.dumps(sets[:1])}"
    assert digests("data.source=/other", again) == (None, "follows")  # what is named is kept


def test_another_state_than_the_origin_names_is_not_taken(tmp_path: Path) -> None:
    source = written_checkpoint(tmp_path / "parent" / "step-000002")
    fence = RunFolder.create(tmp_path / "fork", run_id="f").new_attempt()
    target = tmp_path / "fork" / "a" / "checkpoints" / "step-000002"
    other = ORIGIN.model_copy(update={"state_digest": "t"})
    with pytest.raises(CheckpointError, match=r"state s, but the fork begins .* state t"):
        adopt_checkpoint(source, target, origin=other, trajectory="fork", fence=fence)
    assert not target.exists()
    adopt_checkpoint(source, target, origin=ORIGIN, trajectory="fork", fence=fence)
    assert read_meta(target).trajectory == "fork"
    assert read_meta(source).trajectory == "parent"
    assert (target / "data").read_bytes() == b"tensors"


def test_segments_are_counted_by_the_checkpoints_of_the_plan() -> None:
    plan = PlanSpec(num_steps=10, checkpoint_every=4)

    def bounds(segment: int, *, start: int = 0, last: int = 10) -> tuple[int, int]:
        return segment_bounds(plan, segment=segment, start_step=start, last_step=last)

    assert [bounds(segment) for segment in (1, 2, 3)] == [(0, 4), (4, 8), (8, 10)]
    assert [bounds(segment, start=2) for segment in (1, 2)] == [(2, 4), (4, 8)]
    for segment, last in ((0, 10), (4, 10), (2, 7)):
        with pytest.raises(SpecError, match=rf"segment {segment}: the run has"):
            bounds(segment, last=last)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_shares_of_all_segments_make_the_run(parent: Path) -> None:
    ledger = read_ledger(parent / "a")
    parts = [segment_cost(ledger, start, stop) for start, stop in ((0, 2), (2, 4))]
    assert sum(share for _, share in parts) == pytest.approx(1.0)
    assert sum(seconds for seconds, _ in parts) == pytest.approx(
        sum(line.metrics.get("perf/step_s", 0.0) for line in ledger.lines)
    )


def begun_at(folder: Path, start_step: int, *, changed_step: int | None = None) -> Path:
    """A ledger of a few steps whose weights are the step's number, or another where changed."""
    header = LedgerHeader(
        trajectory="t", plan="p", run_id="r", leg=folder.name, start_step=start_step
    )
    ledger = LedgerWriter(folder, header=header)
    for step in range(start_step, 5):
        value = -step if step == changed_step else step
        digests = {"weights": {"w": digest_floats("w", [float(value)])}}
        update = -1 if step == start_step else 0
        ledger.append(StepRecord(step=step, update=update, digests=digests))
    return folder


def test_a_ledger_begins_with_the_step_of_its_header_and_no_other(tmp_path: Path) -> None:
    assert verify_ledger(begun_at(tmp_path / "a", 2)).lines[0].key == (2, -1)
    header = LedgerHeader(trajectory="t", plan="p", run_id="r", leg="b", start_step=2)
    digests = {"weights": {"w": digest_floats("w", [0.0])}}
    for step in (0, 1, 3):
        with pytest.raises(EngineError, match=r"allowed is \(2, -1\)"):
            LedgerWriter(tmp_path / "b", header=header).append(
                StepRecord(step=step, update=-1, digests=digests)
            )


def test_ledgers_that_begin_at_other_steps_are_compared_where_both_are(tmp_path: Path) -> None:
    whole = begun_at(tmp_path / "whole", 0)
    later = begun_at(tmp_path / "later", 2)
    found = compare_ledgers(whole, later)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 2)
    wrong = compare_ledgers(later, begun_at(tmp_path / "wrong", 0, changed_step=4))
    assert wrong.verdict is Verdict.DIVERGED
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.probe, wrong.first.name) == (4, "weights", "w")
    nothing = compare_ledgers(whole, begun_at(tmp_path / "nothing", 4))
    assert nothing.verdict is Verdict.VACUOUS
