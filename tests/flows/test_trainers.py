"""Either trainer under the whole flow: one chain, gates at zero, nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.provenance.diff import compare_ledgers
from engines.provenance.verdict import Verdict
from engines.runs import read_json
from tests.flows.command_line import SHORT, CommandLine, Ended

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

EXPERTS = {
    "num_experts": 6,
    "experts_per_token": 2,
    "intermediate_size": 48,
    "normalize_weights": True,
}
QWEN3 = ("model.qk_norm=true", "model.qkv_bias=false")
FAMILIES = {
    "qwen3": ("model.family=qwen3", *QWEN3),
    "qwen3_moe": ("model.family=qwen3_moe", *QWEN3, f"model.moe={json.dumps(EXPERTS)}"),
}
"""Family -> what makes the tiny recipe's model one of it."""


def run(lockstep: CommandLine, name: str, *settings: str) -> Ended:
    overrides = [part for setting in settings for part in ("--set", setting)]
    return lockstep("run", "tiny_cpu", "--run-id", name, *overrides, *SHORT)


def test_megatron_gives_the_chain_of_fsdp2_with_the_gate_at_zero(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    settings = ("trainer=megatron", "plan.num_steps=3", "plan.checkpoint_every=2")
    ended = run(lockstep, "megatron", *settings)
    assert ended.code == 0, ended
    folder = lockstep.runs_dir / "megatron"
    gate = read_json(folder / "a" / "gates.json")["logprobs"]["figures"]
    assert gate["max_abs_diff"] == 0.0
    assert gate["num_tokens"] > 500
    found = compare_ledgers(folder / "a", twin_folder / "a", verify=True, across=("trainer",))
    assert found.verdict is Verdict.IDENTICAL, found.headline
    assert found.common_steps == 3
    undeclared = compare_ledgers(folder / "a", twin_folder / "a")
    assert undeclared.verdict is Verdict.INCOMPARABLE
    again = lockstep("resume", "megatron@2", "--set", "plan.num_steps=4")
    assert again.code == 0, again
    found = compare_ledgers(folder / "a", twin_folder / "a", verify=True, across=("trainer",))
    assert found.verdict is Verdict.IDENTICAL, found.headline
    assert found.common_steps == 4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_has_one_chain_on_both_trainers_with_the_gates_at_zero(
    family: str, lockstep: CommandLine
) -> None:
    settings = (*FAMILIES[family], "plan.num_steps=3")
    for name in ("fsdp2", "megatron"):
        ended = run(lockstep, f"{family}-{name}", *settings, f"trainer={name}")
        assert ended.code == 0, ended
    legs = [lockstep.runs_dir / f"{family}-{name}" / "a" for name in ("fsdp2", "megatron")]
    for leg in legs:
        gate = read_json(leg / "gates.json")["logprobs"]["figures"]
        assert gate["max_abs_diff"] == 0.0
        assert gate["exact_fraction"] == 1.0
    found = compare_ledgers(*legs, verify=True, across=("trainer",))
    assert found.verdict is Verdict.IDENTICAL, found.headline


def test_three_rollouts_of_two_updates_with_kl_repeat_resume_and_agree(
    lockstep: CommandLine,
) -> None:
    settings = (
        "loss.updates_per_step=2",
        "loss.kl_coef=0.1",
        "plan.num_steps=3",
        "plan.checkpoint_every=1",
        "plan.keep_tensor_steps=0",
    )
    names = {"kl-fsdp2": "fsdp2", "kl-megatron": "megatron", "kl-again": "megatron"}
    for name, trainer in names.items():
        ended = run(lockstep, name, *settings, f"trainer={trainer}")
        assert ended.code == 0, ended
    resumed = lockstep("resume", "kl-again@1")
    assert resumed.code == 0, resumed
    whole = lockstep.runs_dir / "kl-megatron" / "a"
    for name, across in (("kl-again", ()), ("kl-fsdp2", ("trainer",))):
        other = lockstep.runs_dir / name / "a"
        found = compare_ledgers(whole, other, verify=True, across=across)
        assert found.verdict is Verdict.IDENTICAL, found.headline
        assert found.common_steps == 3
