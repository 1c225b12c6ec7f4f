"""Either trainer under the whole flow: one chain, gates at zero, nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.provenance.diff import compare_ledgers
from engines.provenance.verdict import Verdict
from model_specs.json_text import read_json
from tests.flows.command_line import CommandLine, Ended

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

EXPERTS = {
    "num_experts": 6,
    "experts_per_token": 2,
    "intermediate_size": 48,
    "normalize_weights": True,
}
QWEN3 = ("model.qk_norm=true", "model.qkv_bias=false")
FAMILIES = {
    "qwen2": (),
    "llama": ("model.family=llama", "model.qkv_bias=false", "model.tie_word_embeddings=false"),
    "qwen3": ("model.family=qwen3", *QWEN3),
    "qwen3_moe": ("model.family=qwen3_moe", *QWEN3, f"model.moe={json.dumps(EXPERTS)}"),
}
"""Family -> what makes the tiny recipe's model one of it."""


def run(lockstep: CommandLine, name: str, *settings: str) -> Ended:
    without = ("plan.gates.controls=off", "plan.gates.preflight=off")
    overrides = [part for setting in (*settings, *without) for part in ("--set", setting)]
    return lockstep("run", "tiny_cpu", "--run-id", name, *overrides)


def assert_both_gates_at_zero(leg: Path) -> None:
    """Every log-prob of every step, and every element of every layer after the last."""
    found = read_json(leg / "gates.json")
    assert found["logprobs"]["figures"]["max_abs_diff"] == 0.0
    assert found["logprobs"]["figures"]["exact_fraction"] == 1.0
    assert found["logprobs"]["figures"]["num_tokens"] > 100
    assert found["layerwise"]["summary"].startswith("the first sample of each of 4 prompts: ")
    layers = found["layerwise"]["figures"]
    assert (layers["num_requests"], layers["num_layers"]) == (4, 2)
    assert layers["num_exact"] == layers["num_elements"] > 10_000
    assert layers["num_prefill_positions"] > 0 < layers["num_decode_positions"]


def test_megatron_gives_the_chain_of_fsdp2_with_the_gate_at_zero(
    lockstep: CommandLine, twin_folder: Path
) -> None:
    settings = ("trainer=megatron", "plan.num_steps=3", "plan.checkpoint_every=2")
    ended = run(lockstep, "megatron", *settings)
    assert ended.code == 0, ended
    folder = lockstep.runs_dir / "megatron"
    assert_both_gates_at_zero(folder / "a")
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_has_one_chain_on_both_trainers_with_both_gates_at_zero(
    family: str, dtype: str, lockstep: CommandLine
) -> None:
    settings = (*FAMILIES[family], f"numerics.compute_dtype={dtype}", "plan.num_steps=3")
    legs = []
    for trainer in ("fsdp2", "megatron"):
        name = f"{family}-{dtype}-{trainer}"
        ended = run(lockstep, name, *settings, f"trainer={trainer}")
        assert ended.code == 0, ended
        legs.append(lockstep.runs_dir / name / "a")
        assert_both_gates_at_zero(legs[-1])
    found = compare_ledgers(*legs, verify=True, across=("trainer",))
    assert found.verdict is Verdict.IDENTICAL, found.headline


@pytest.mark.timeout(1200)  # six commands
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
    legs = {}
    for trainer in ("fsdp2", "megatron"):
        for turn in ("first", "again"):
            name = f"kl-{trainer}-{turn}"
            ended = run(lockstep, name, *settings, f"trainer={trainer}")
            assert ended.code == 0, ended
            legs[trainer, turn] = lockstep.runs_dir / name / "a"
    for trainer in ("fsdp2", "megatron"):
        assert_three_equal_steps(legs[trainer, "first"], legs[trainer, "again"])
        before = (legs[trainer, "again"] / "ledger.jsonl").read_bytes()
        # Steps 2 and 3 of the second run are dropped and run again, from its own checkpoint.
        resumed = lockstep("resume", f"kl-{trainer}-again@1")
        assert resumed.code == 0, resumed
        assert (legs[trainer, "again"] / "ledger.jsonl").read_bytes() != before
        assert_three_equal_steps(legs[trainer, "first"], legs[trainer, "again"])
    assert_three_equal_steps(legs["fsdp2", "first"], legs["megatron", "first"], across=("trainer",))


def assert_three_equal_steps(leg: Path, other: Path, *, across: tuple[str, ...] = ()) -> None:
    found = compare_ledgers(leg, other, verify=True, across=across)
    assert found.verdict is Verdict.IDENTICAL, found.headline
    assert found.common_steps == 3
