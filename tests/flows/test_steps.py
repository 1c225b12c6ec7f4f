"""Laws of a few real steps: exact zeros where they must be, draws that differ where they must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.cluster import gather
from engines.loop import sample_requests
from engines.provenance.diff import compare_ledgers
from engines.provenance.digest import digest_floats
from engines.provenance.ledger import read_ledger
from engines.provenance.side_files import read_digests, read_values
from engines.provenance.verdict import Verdict
from model_specs.errors import EngineError
from model_specs.recipes.tiny_cpu import LEARNING_THRESHOLD
from tests.flows.conftest import Runner

pytestmark = pytest.mark.slow


def test_at_the_sampling_weights_every_ratio_and_kl_is_exactly_zero(reference: Path) -> None:
    metrics = read_ledger(reference).lines[1].metrics
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/kl"] == 0.0
    assert metrics["train/pg_clipfrac"] == 0.0
    assert metrics["train/grad_norm"] > 0.0


def test_after_an_update_the_kl_to_the_reference_is_not_zero(reference: Path) -> None:
    assert read_ledger(reference).lines[2].metrics["train/kl"] > 0.0


def test_the_gate_is_exactly_zero_at_every_step(reference: Path) -> None:
    lines = [line for line in read_ledger(reference).lines if line.update == 0]
    assert len(lines) == 3
    for line in lines:
        assert line.metrics["gate/logprob_abs_diff/max"] == 0.0
        assert line.metrics["gate/exact_fraction"] == 1.0
        assert line.metrics["gate/num_tokens"] > 0


def test_truncated_samples_are_scored_and_counted_and_left_out_of_the_loss_when_asked(
    runner: Runner, reference: Path
) -> None:
    masked = runner.run("loss.mask_truncated=true", steps=1)
    found, all_in = (read_ledger(leg).lines[1] for leg in (masked, reference))
    for probe in ("tokens", "rewards", "advantages", "train_logprobs"):
        assert found.roots[probe] == all_in.roots[probe], probe
    assert found.roots["grads"] != all_in.roots["grads"]
    rows = [json.loads(line) for line in (masked / "samples.jsonl").read_text().splitlines()]
    cut = {row["request_id"] for row in rows if row["finish_reason"] == "length"}
    assert 0 < len(cut) < len(rows)
    assert found.metrics["rollout/truncated_ratio"] == len(cut) / len(rows)
    losses, before = (read_digests(leg, 1, 0)["loss"] for leg in (masked, reference))
    for name in cut:
        assert losses[name] == digest_floats(name, [0.0])
        assert before[name] != losses[name]
    ended = {row["request_id"] for row in rows} - cut
    assert all(losses[name] != digest_floats(name, [0.0]) for name in ended)


def test_samples_of_a_group_differ(reference: Path) -> None:
    tokens = read_values(reference, 1, 0)["tokens"]
    groups: dict[str, set[tuple[int, ...]]] = {}
    for name, ids in tokens.items():
        groups.setdefault(name.split("/")[1], set()).add(tuple(ids))
    assert all(len(drawn) > 1 for drawn in groups.values())


def test_the_same_prompt_at_another_step_draws_other_tokens(runner: Runner) -> None:
    _, rollout, prompts = runner.opened.engines()
    drawn = [
        [
            sample.token_ids
            for sample in rollout.generate(
                sample_requests(prompts.prompts[:4], runner.opened.spec, step)
            )
        ]
        for step in (1, 2, 1)
    ]
    assert drawn[0] == drawn[2]
    pairs = list(zip(drawn[0], drawn[1], strict=True))
    # Two short draws can agree by chance; long ones cannot.
    assert all(one != other for one, other in pairs if min(len(one), len(other)) > 3)
    assert sum(one != other for one, other in pairs) > len(pairs) // 2


def test_another_root_seed_draws_other_tokens_at_the_first_step(
    runner: Runner, reference: Path
) -> None:
    other = runner.run("seeds.root=2", "data.shuffle=false", steps=1)
    ours = list(read_values(other, 1, 0)["tokens"].values())
    theirs = list(read_values(reference, 1, 0)["tokens"].values())
    assert not set(map(tuple, ours)) & set(map(tuple, theirs))


def test_runs_of_other_trajectories_are_incomparable_with_the_field_named(
    runner: Runner, reference: Path
) -> None:
    folder = runner.run("seeds.root=2", steps=1)
    (folder / "spec.json").write_text(
        runner.opened.spec.model_copy(
            update={"seeds": runner.opened.spec.seeds.model_copy(update={"root": 2})}
        ).model_dump_json()
    )
    (reference / "spec.json").write_text(runner.opened.spec.model_dump_json())
    found = compare_ledgers(reference, folder)
    assert found.verdict is Verdict.INCOMPARABLE
    assert found.identity_differences == (("seeds.root", 1234, 2),)
    declared = compare_ledgers(reference, folder, across=("seeds",))
    assert declared.verdict is Verdict.DIVERGED


@pytest.mark.parametrize(
    ("breaker", "said"),
    [
        (
            "in_rollout:variable_overwritten",
            r"rollout-0\.variables\.OMP_NUM_THREADS was '1' .* '7'",
        ),
        (
            "in_trainer:switch_flipped",
            r"trainer\.torch\.deterministic_algorithms was True .* False",
        ),
    ],
)
def test_what_was_changed_in_an_engine_during_a_segment_ends_it(
    runner: Runner, breaker: str, said: str
) -> None:
    opened, live = runner.opened, "engines.drill.live:"
    is_rollout = breaker.startswith("in_rollout")
    (host,) = opened.rollout_hosts if is_rollout else opened.trainer_hosts
    gather([host.on_engine(f"{live}start_fault", f"engines.drill.{breaker}")], what="fault")
    try:
        with pytest.raises(EngineError, match=said):
            runner.run(steps=1)
    finally:
        gather([host.on_engine(f"{live}end_fault")], what="end of the fault")
    runner.run(steps=1)


SEEDS = [
    1,
    pytest.param(2, marks=pytest.mark.exhaustive),
    pytest.param(3, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("root", SEEDS)
def test_the_tiny_recipe_learns(runner: Runner, root: int) -> None:
    assert final_reward(runner, f"seeds.root={root}") > LEARNING_THRESHOLD


@pytest.mark.parametrize("root", SEEDS)
@pytest.mark.parametrize(
    "transform", ["shuffled", pytest.param("sign_flipped", marks=pytest.mark.exhaustive)]
)
def test_it_does_not_learn_from_wrong_advantages(runner: Runner, root: int, transform: str) -> None:
    reward = final_reward(runner, f"seeds.root={root}", f"loss.advantage_transform={transform}")
    assert reward < LEARNING_THRESHOLD


def final_reward(runner: Runner, *overrides: str) -> float:
    """Mean reward of the last three steps."""
    lines = read_ledger(runner.run(*overrides, steps=8)).lines
    return sum(line.metrics["reward/mean"] for line in lines[-3:]) / 3
