"""The filter stage: which prompts are kept, that it is recorded, and that another result is red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines import prompt_filter
from engines.contracts import Prompt, PromptSet
from engines.provenance.diff import compare_ledgers
from engines.provenance.lock import read_lock
from engines.provenance.verdict import Verdict
from engines.rewards import as_float32
from engines.runs import new_run, read_spec
from flows.fork import forked
from model_specs.errors import ArtifactError, DivergedError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.json_text import read_json
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import FilterSpec
from tasks import filter_prompts, train
from tests.flows.command_line import SHORT, CommandLine
from tests.flows.conftest import Runner, ledger
from tests.flows.made_checkpoints import write_meta

BAND = ("filter.low=0.1", "filter.high=0.9", "filter.threshold=0.1", "filter.candidates=24")


def prompts(count: int) -> PromptSet:
    """Prompts named 0, 1, ..."""
    made = tuple(
        Prompt(prompt_id=str(n), token_ids=(n,), text=str(n), label="") for n in range(count)
    )
    return PromptSet(prompts=made, num_dropped_too_long=0, digest="")


def test_a_prompt_is_kept_when_its_pass_rate_lies_in_the_band() -> None:
    spec = FilterSpec(low=0.25, high=0.75, samples_per_prompt=4, threshold=0.5)
    rewards = [0, 0, 0, 0.4, 1, 0, 0, 0, 1, 0.5, 1, 0, 1, 1, 1, 1]
    rates = prompt_filter.pass_rates(prompts(4).prompts, rewards, spec)
    assert [rate.rate for rate in rates] == [0.0, 0.25, 0.75, 1.0]
    assert prompt_filter.kept_prompts(rates, spec) == ("1", "2")
    one = spec.model_copy(update={"max_prompts": 1})
    assert prompt_filter.kept_prompts(rates, one) == ("1",)


def test_a_reward_at_the_threshold_has_passed_though_it_is_a_float32() -> None:
    reward = as_float32(0.9)
    assert reward < 0.9
    spec = FilterSpec(low=0.0, high=1.0, samples_per_prompt=2, threshold=0.9)
    (rate,) = prompt_filter.pass_rates(prompts(1).prompts, [reward, 0.0], spec)
    assert rate.num_passed == 1


def test_an_empty_band_is_refused_with_the_rates_that_were_found() -> None:
    spec = FilterSpec(low=0.4, high=0.6, samples_per_prompt=2)
    rates = prompt_filter.pass_rates(prompts(2).prompts, [0, 0, 1, 1], spec)
    with pytest.raises(SpecError, match=r"rates found go from 0\.0 to 1\.0"):
        prompt_filter.kept_prompts(rates, spec)


def test_the_draws_of_the_filter_are_of_their_own() -> None:
    spec = apply_overrides(load_recipe("tiny_cpu"), BAND)
    requests = prompt_filter.filter_requests(prompts(3).prompts, spec)
    assert len({request.seed for request in requests}) == 3 * 8
    assert requests[9].request_id == "filter/1/1"


def test_what_was_kept_is_recorded_and_is_no_part_of_the_trajectory() -> None:
    asked = apply_overrides(load_recipe("tiny_cpu"), BAND)
    assert asked.filter is not None
    filled = asked.filter.model_copy(update={"kept_ids": ("1",), "kept_digest": "d"})
    resolved = asked.model_copy(update={"filter": filled})
    assert trajectory_fingerprint(resolved) == trajectory_fingerprint(asked)
    other = apply_overrides(asked, ("filter.high=0.8",))
    assert trajectory_fingerprint(other) != trajectory_fingerprint(asked)
    assert trajectory_fingerprint(load_recipe("tiny_cpu")) != trajectory_fingerprint(asked)


def test_another_result_than_the_recorded_one_is_diverged() -> None:
    spec = FilterSpec(low=0, high=1, kept_ids=("1", "2"), kept_digest="d")
    prompt_filter.require_same(spec, ("1", "2"), "d")
    with pytest.raises(DivergedError, match="first that only one has: 3"):
        prompt_filter.require_same(spec, ("1", "2", "3"), "e")
    with pytest.raises(DivergedError, match="same prompts, other samples"):
        prompt_filter.require_same(spec, ("1", "2"), "e")


@pytest.mark.slow
def test_a_leg_trains_on_the_kept_prompts_alone_and_draws_the_same_again(runner: Runner) -> None:
    found = []
    for _ in range(2):
        with runner.leg(*BAND) as opened:
            artifact = filter_prompts.filter_prompts.fn(opened.name, runner.weights)
            train.train_segment.fn(opened.name, runner.weights, start_step=0, to_step=2)
            rows = json.loads((opened.folder / "filter.json").read_text())
            spec = read_spec(opened.folder)
            assert spec.filter is not None
            assert rows["kept_ids"] == list(spec.filter.kept_ids)
            assert 4 <= len(rows["kept_ids"]) < len(rows["prompts"]) == 24
            used = {row["prompt_id"] for row in samples(opened.folder)}
            assert used <= set(rows["kept_ids"])
            (row,) = [row for row in read_lock(opened.folder) if row.stage == "filter"]
            assert row.outputs == {"prompts": artifact.digest}
            assert spec.filter.kept_digest == artifact.digest
            found.append((artifact.digest, ledger(opened.folder).chain))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_resumed_leg_takes_what_is_recorded_and_a_changed_record_is_red(runner: Runner) -> None:
    with runner.leg(*BAND) as opened:
        filter_prompts.filter_prompts.fn(opened.name, runner.weights)
        kept = opened.spec.filter
        path = opened.folder / "filter.json"
        recorded = json.loads(path.read_text())
        filter_prompts.filter_prompts.fn(opened.name, runner.weights)
        assert opened.spec.filter == kept
        path.write_text(json.dumps({**recorded, "kept_ids": recorded["kept_ids"][1:]}))
        with pytest.raises(DivergedError, match="filter: "):
            filter_prompts.filter_prompts.fn(opened.name, runner.weights)
        path.unlink()
        opened.spec = opened.spec.model_copy(update={"filter": kept})
        filter_prompts.filter_prompts.fn(opened.name, runner.weights, again=False)
        assert json.loads(path.read_text())["prompts"] == []  # taken, not drawn
        assert opened.spec.filter == kept
        path.write_text("{}")
        with pytest.raises(ArtifactError, match="damaged"):
            filter_prompts.filter_prompts.fn(opened.name, runner.weights)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_twin_with_a_filter_is_identical_and_can_be_resumed(lockstep: CommandLine) -> None:
    changes = (*BAND, "plan.num_steps=2", "plan.checkpoint_every=1", "sampling.oversample=2")
    flags = [part for change in changes for part in ("--set", change)]
    ended = lockstep("run", "tiny_cpu", "--twin", "--run-id", "filtered", *flags, *SHORT)
    assert ended.code == 0, ended
    folder = lockstep.runs_dir / "filtered"
    kept = [read_json(folder / leg / "filter.json") for leg in "ab"]
    assert kept[0] == kept[1]
    ended = lockstep("resume", "filtered@1", "--set", "plan.num_steps=3")
    assert ended.code == 0, ended
    assert "\nIdentical\n" in ended.stdout  # the legs were compared again
    assert [line.step for line in ledger(folder / "a").lines] == [0, 1, 2, 3]
    assert read_json(folder / "a" / "filter.json") == kept[0]
    resumed, twin = ledger(folder / "a").lines[2], ledger(folder / "b").lines[2]
    assert resumed.chain == twin.chain
    forked_same(lockstep, folder)
    forked_narrower(lockstep, folder)


def forked_same(lockstep: CommandLine, parent: Path) -> None:
    """A fork takes what its parent's filter kept, draws nothing for it, and goes on as its parent.

    Had it drawn again, at the weights that it begins with, its pass rates would be others.
    """
    ended = lockstep("fork", f"{parent.name}@1", "--run-id", "filtered-fork", *SHORT)
    assert ended.code == 0, ended
    assert "filter kept" not in ended.stdout
    fork = lockstep.runs_dir / "filtered-fork"
    ours, theirs = (read_json(path / "a" / "filter.json") for path in (fork, parent))
    assert ours == {**theirs, "prompts": []}
    found = compare_ledgers(parent / "a", fork / "a", across=("origin",), verify=True)
    assert (found.verdict, found.common_steps) == (Verdict.IDENTICAL, 2)


def forked_narrower(lockstep: CommandLine, parent: Path) -> None:
    """A fork whose filter is another draws for itself."""
    band = ("--set", "filter.high=0.6")
    ended = lockstep("fork", f"{parent.name}@1", "--run-id", "narrower", *band, *SHORT)
    assert ended.code == 0, ended
    assert "a filter kept" in ended.stdout
    ours, theirs = (
        read_json(path / "a" / "filter.json") for path in (lockstep.runs_dir / "narrower", parent)
    )
    assert len(ours["prompts"]) == 24
    assert set(ours["kept_ids"]) < set(theirs["kept_ids"])


def filtered_parent(folder: Path) -> Path:
    """A run folder with a recorded filter and a committed checkpoint of step 1."""
    asked = apply_overrides(load_recipe("tiny_cpu"), BAND)
    assert asked.filter is not None
    filled = asked.filter.model_copy(update={"kept_ids": ("1", "4"), "kept_digest": "d"})
    data = asked.data.model_copy(update={"digest": "text"})
    spec = asked.model_copy(update={"filter": filled, "data": data})
    run = new_run(spec, folder, run_id="parent")
    place = run.folder / "a" / "checkpoints" / "step-000001"
    write_meta(place, 1, state="s", trajectory=trajectory_fingerprint(spec))
    return run.folder


def test_a_fork_keeps_what_was_kept_unless_its_filter_is_another(tmp_path: Path) -> None:
    parent = filtered_parent(tmp_path)

    def kept(*overrides: str) -> tuple[str, ...]:
        found = forked(parent, 1, overrides, leg="a").filter
        assert found is not None
        assert bool(found.kept_ids) == (found.kept_digest is not None)
        return found.kept_ids

    assert kept("optimizer.lr=1e-3") == ("1", "4")
    assert kept("filter.high=0.8") == ()
    assert kept("filter.threshold=0.5", "sampling.temperature=0.5") == ()
    assert kept("data.source=/other") == kept("data.split=test") == ()  # ids of other prompts
    assert kept("data.source=/same", "data.digest=text") == ("1", "4")
    assert forked(parent, 1, ("filter=null",), leg="a").filter is None


def samples(folder: Path) -> list[dict[str, object]]:
    """Rows of a leg's samples."""
    text = (folder / "samples.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
