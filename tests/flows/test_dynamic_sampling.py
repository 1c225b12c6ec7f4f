"""Dynamic sampling: groups are chosen in data order, whatever finishes first."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engines.group_selection import select_groups
from engines.metrics import unknown_metrics
from engines.provenance.diff import compare_ledgers
from engines.provenance.verdict import Verdict
from engines.rollout.group import RolloutGroup
from model_specs.errors import EngineError, SpecError
from model_specs.overrides import apply_overrides
from tasks import train
from tests.flows.conftest import Runner, ledger

SLEEPY = '''
"""A reward that takes as long as it likes: the value is a function, the time is not."""
import random
import time


def score(completion, label, *, spec, finish_reason, metadata):
    time.sleep(random.Random().random() / 200)
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
'''
OVERSAMPLED = ("sampling.oversample=2", "plan.keep_tensor_steps=0")


def test_the_first_groups_with_variance_are_kept_in_data_order() -> None:
    rewards = [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [0.5, 0.0], [0.0, 1.0]]
    selection = select_groups(rewards, wanted=3)
    assert selection.kept == (1, 3, 4)
    assert (selection.num_filled, selection.num_with_variance) == (0, 4)
    assert selection.samples(2) == (2, 3, 6, 7, 8, 9)
    assert selection.metrics()["sampling/unused_groups"] == 3.0


def test_too_few_groups_with_variance_are_filled_up_and_counted() -> None:
    rewards = [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]
    selection = select_groups(rewards, wanted=3)
    assert selection.kept == (0, 1, 2)
    assert selection.num_filled == 2
    with pytest.raises(EngineError, match="1 groups were drawn, but 2"):
        select_groups([[0.0, 1.0]], wanted=2)


def test_more_prompts_than_the_data_has_are_refused_with_both_numbers(runner: Runner) -> None:
    with runner.leg("sampling.oversample=128") as opened, pytest.raises(SpecError, match="512"):
        train.train_segment.fn(opened.name, runner.weights, start_step=0, to_step=1)


@pytest.mark.slow
def test_a_step_trains_on_groups_with_variance_and_records_all_that_it_drew(
    runner: Runner,
) -> None:
    folder = runner.run(*OVERSAMPLED, steps=2)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for step in (1, 2):
        drawn = [row for row in rows if row["step"] == step]
        assert len(drawn) == 2 * 4 * 8
        groups: dict[str, list[float]] = {}
        for row in drawn:
            groups.setdefault(row["prompt_id"], []).append(row["reward"])
        kept = select_groups(list(groups.values()), wanted=4).kept
        wanted = {list(groups)[index] for index in kept}
        assert {row["prompt_id"] for row in drawn if row["used"]} == wanted
        digests = json.loads((folder / f"digests/step-{step:06d}-0.json").read_text())
        probes = digests.get("digests", digests)
        assert len(probes["tokens"]) == len(probes["rewards"]) == 64
        assert len(probes["advantages"]) == len(probes["train_logprobs"]) == 32
    metrics = [line.metrics for line in ledger(folder).lines if line.step]
    assert all(line["sampling/drawn_groups"] == 8.0 for line in metrics)
    assert all(line["gate/logprob_abs_diff/max"] == 0.0 for line in metrics)
    assert all(line["mismatch/ppl_ratio"] == 1.0 for line in metrics)
    assert all(unknown_metrics(line) == () for line in metrics)


@pytest.mark.slow
def test_slow_rewards_and_shuffled_requests_change_no_bit(runner: Runner, tmp_path: Path) -> None:
    reward = tmp_path / "sleepy.py"
    reward.write_text(SLEEPY)
    overrides = (*OVERSAMPLED, f"reward={reward}:score")
    first = runner.run(*overrides, steps=2)
    with runner.leg(*overrides) as opened:
        order = f"execution.request_order_seed={random.Random().randrange(1000)}"
        opened.rollout = RolloutGroup(opened.rollout_hosts, apply_overrides(opened.spec, (order,)))
        train.train_segment.fn(opened.name, runner.weights, start_step=0, to_step=2)
        second = opened.folder
    found = compare_ledgers(first, second)
    assert found.verdict == Verdict.IDENTICAL, found.headline
    assert ledger(first).chain == ledger(second).chain


@pytest.mark.slow
def test_drawing_other_groups_is_seen(runner: Runner) -> None:
    # The control: the comparison above can be red.
    one, two = (runner.run(*OVERSAMPLED, f"seeds.root={root}", steps=1) for root in (5, 6))
    assert ledger(one).chain != ledger(two).chain
