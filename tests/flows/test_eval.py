"""Evaluation during training: its figures are of the weights, and no bit of the run sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.contracts import Prompt, Sample
from engines.evaluation import eval_requests, judge_eval
from engines.loop import sample_requests
from engines.provenance.ledger import read_ledger
from model_specs.errors import SpecError
from model_specs.fingerprint import plan_fingerprint, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.run_spec import EvalSampling, EvalSet, RewardSpec, RunSpec
from tasks import download, evaluate, train
from tasks.tracked_folder import read_run_folder, spec_params
from tests.flows.conftest import Runner

GREEDY = {
    "name": "greedy",
    "split": "test",
    "limit": 6,
    "every": 2,
    "sampling": {"max_new_tokens": 6},
}
DRAWN = {
    "name": "drawn",
    "split": "test",
    "limit": 3,
    "every": 3,
    "before_training": False,
    "sampling": {"max_new_tokens": 8, "temperature": 1.0, "samples_per_prompt": 2},
    "reward": {"name": "digits"},
}
EVALS = f"plan.evals={json.dumps([GREEDY, DRAWN])}"


def evaluated(runner: Runner, *overrides: str, steps: int) -> Path:
    """A leg with both sets."""
    with runner.leg(EVALS, *overrides) as sibling:
        inputs = download.download.fn(sibling.name)
        assert inputs.evals is not None
        evaluate.prepare_evals(sibling, inputs.model, inputs.evals)
        train.train_segment.fn(sibling.name, runner.weights, start_step=0, to_step=steps)
        return sibling.folder


@pytest.fixture(scope="module")
def with_evals(runner: Runner) -> Path:
    return evaluated(runner, steps=3)


def read_eval(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "evals" / f"step-{step:06d}.json").read_text())["sets"]


@pytest.mark.slow
def test_a_run_with_evaluations_has_the_chain_of_the_one_without(
    with_evals: Path, reference: Path
) -> None:
    ours, theirs = read_ledger(with_evals), read_ledger(reference)
    assert [line.chain for line in ours.lines] == [line.chain for line in theirs.lines]
    assert ours.header.trajectory == theirs.header.trajectory
    assert ours.header.plan != theirs.header.plan


@pytest.mark.slow
def test_sets_are_evaluated_before_the_first_update_and_when_they_are_due(with_evals: Path) -> None:
    found = {
        path.stem: sorted(read_eval(with_evals, int(path.stem[5:])))
        for path in sorted((with_evals / "evals").iterdir())
    }
    assert found == {
        "step-000000": ["greedy"],
        "step-000002": ["greedy"],
        "step-000003": ["drawn"],
    }


@pytest.mark.slow
def test_the_metrics_of_a_step_have_accuracy_with_its_number(with_evals: Path) -> None:
    rows = [json.loads(line) for line in (with_evals / "metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row["metrics"])
    assert by_step[0]["eval/greedy/num"] == 6
    assert by_step[3]["eval/drawn/num"] == 6
    assert "eval/greedy/accuracy" not in by_step[1]
    samples = read_eval(with_evals, 2)["greedy"]["samples"]
    right = sum(sample["reward"] >= 1.0 for sample in samples)
    assert by_step[2]["eval/greedy/accuracy"] == right / 6
    assert [sample["request_id"] for sample in samples] == sorted(s["request_id"] for s in samples)
    assert {sample["prompt_id"].split("-")[0] for sample in samples} == {"test"}


@pytest.mark.slow
def test_equal_weights_have_equal_evaluations_and_trained_ones_others(
    runner: Runner, with_evals: Path
) -> None:
    again = evaluated(runner, "execution.request_order_seed=5", steps=2)
    for step in (0, 2):
        assert read_eval(again, step)["greedy"] == read_eval(with_evals, step)["greedy"]
    first, later = (read_eval(with_evals, step)["greedy"]["digest"] for step in (0, 2))
    assert first != later


@pytest.mark.slow
def test_evaluations_after_the_checkpoint_of_a_resume_are_dropped(runner: Runner) -> None:
    with runner.leg(EVALS) as sibling:
        inputs = download.download.fn(sibling.name)
        assert inputs.evals is not None
        evaluate.prepare_evals(sibling, inputs.model, inputs.evals)
        train.train_segment.fn(sibling.name, runner.weights, start_step=0, to_step=2)
        train.forget_after(sibling, train.open_ledger(sibling), 1)
        kept = sorted(path.name for path in (sibling.folder / "evals").iterdir())
    assert kept == ["step-000000.json"]


def test_evaluations_belong_to_the_plan_and_not_to_the_trajectory(spec: RunSpec) -> None:
    with_sets = apply_overrides(spec, (EVALS,))
    assert trajectory_fingerprint(with_sets) == trajectory_fingerprint(spec)
    assert plan_fingerprint(with_sets) != plan_fingerprint(spec)
    other = apply_overrides(with_sets, (EVALS.replace('"every": 2', '"every": 4'),))
    assert plan_fingerprint(other) != plan_fingerprint(with_sets)
    assert spec_params(with_sets)["plan.evals.0.every"] == "2"


def test_seeds_of_an_evaluation_name_the_set_and_not_the_step(spec: RunSpec) -> None:
    chosen = EvalSet.model_validate(DRAWN)
    prompts = (Prompt(prompt_id="train-1", token_ids=(1,), text="", label=""),)
    seeds = {
        step: [r.seed for r in eval_requests(chosen, prompts, root=1234, step=step)]
        for step in (1, 2)
    }
    assert seeds[1] == seeds[2]
    assert len(set(seeds[1])) == 2
    training = {request.seed for request in sample_requests(prompts, spec, 1)}
    assert not training & set(seeds[1])


def test_accuracy_counts_rewards_at_or_above_the_threshold() -> None:
    samples = [sample(name, text) for name, text in (("b", "12"), ("a", "1x"), ("c", "xx"))]
    prompts = [Prompt(prompt_id=s.prompt_id, token_ids=(1,), text="", label="") for s in samples]
    given = {**DRAWN, "name": "t"}
    strict = judge_eval(EvalSet.model_validate(given), prompts, samples, RewardSpec(name="digits"))
    assert strict.metrics["eval/t/num"] == 3
    rewards = [row["reward"] for row in strict.rows]
    assert [row["prompt_id"] for row in strict.rows] == ["a", "b", "c"]
    assert strict.metrics["eval/t/accuracy"] == sum(r >= 1 for r in rewards) / 3
    lenient = EvalSet.model_validate({**given, "correct_at": min(rewards)})
    found = judge_eval(lenient, prompts, samples, RewardSpec(name="digits"))
    assert found.metrics["eval/t/accuracy"] == 1.0
    assert strict.metrics["eval/t/accuracy"] < 1.0
    # Rewards are float32, which 0.7 is not: its nearest lies below it, and counts.
    best = RewardSpec(name="gsm8k", format_credit=0.7)
    answered = [sample("a", "#### 3")]
    at_credit = EvalSet.model_validate({**given, "correct_at": 0.7})
    labelled = [Prompt(prompt_id="a", token_ids=(1,), text="", label="4")]
    assert judge_eval(at_credit, labelled, answered, best).metrics["eval/t/accuracy"] == 1.0


def sample(prompt_id: str, text: str) -> Sample:
    return Sample(
        request_id=f"eval/t/1/{prompt_id}/0",
        prompt_id=prompt_id,
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=(2, 3),
        logprobs=(-0.5, -0.25),
        text=text,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling": {"max_new_tokens": 4, "samples_per_prompt": 2}}, "same completion again"),
        ({"name": "a/b"}, "name"),
        ({"label_key": "answer"}, "set format"),
        ({"every": 0}, "every"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused(
    spec: RunSpec, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        apply_overrides(spec, (f"plan.evals={json.dumps([GREEDY | change])}",))


def test_two_sets_of_one_name_and_the_training_file_itself_are_refused(
    spec: RunSpec, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match="two sets of the name 'greedy'"):
        apply_overrides(spec, (f"plan.evals={json.dumps([GREEDY, GREEDY])}",))
    file = tmp_path / "train.jsonl"
    file.write_text("{}\n")
    with pytest.raises(SpecError, match="training file itself"):
        apply_overrides(spec, (f"data.source={file}", EVALS))
    held_out = EVALS.replace('"split": "test"', '"rows": "-10:"')
    assert apply_overrides(spec, (f"data.source={file}", held_out)).plan.evals[0].rows == "-10:"
    folder = tmp_path / "v1.2"
    folder.mkdir()
    assert len(apply_overrides(spec, (f"data.source={folder}", EVALS)).plan.evals) == 2


def test_greedy_is_only_for_evaluations(spec: RunSpec) -> None:
    assert EvalSampling(max_new_tokens=1).temperature == 0
    with pytest.raises(SpecError, match="temperature"):
        apply_overrides(spec, ("sampling.temperature=0",))


@pytest.mark.slow
def test_mlflow_is_given_the_evaluation_before_the_first_step(
    runner: Runner, with_evals: Path
) -> None:
    leg = next(
        leg for leg in read_run_folder(runner.opened.run_dir).legs if leg.folder == with_evals
    )
    assert leg.steps[0].step == 0
    assert leg.steps[0].values["eval/greedy/num"] == 6.0
