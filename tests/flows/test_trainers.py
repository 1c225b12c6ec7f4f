"""Either trainer under the whole flow: one chain, gates at zero, nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.provenance.diff import compare_ledgers
from engines.provenance.verdict import Verdict
from engines.runs import read_json
from tests.flows.command_line import SHORT, CommandLine, Ended

pytestmark = pytest.mark.slow

QWEN3 = ("model.family=qwen3", "model.qk_norm=true", "model.qkv_bias=false")


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


def test_qwen3_has_one_chain_on_both_trainers_with_the_gate_at_zero(
    lockstep: CommandLine,
) -> None:
    for name in ("fsdp2", "megatron"):
        ended = run(lockstep, f"qwen3-{name}", *QWEN3, f"trainer={name}", "plan.num_steps=3")
        assert ended.code == 0, ended
    legs = [lockstep.runs_dir / f"qwen3-{name}" / "a" for name in ("fsdp2", "megatron")]
    for leg in legs:
        gate = read_json(leg / "gates.json")["logprobs"]["figures"]
        assert gate["max_abs_diff"] == 0.0
        assert gate["exact_fraction"] == 1.0
    found = compare_ledgers(*legs, verify=True, across=("trainer",))
    assert found.verdict is Verdict.IDENTICAL, found.headline
