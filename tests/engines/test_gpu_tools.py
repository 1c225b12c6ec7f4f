"""The tools for one and for two GPUs, whole, on CPU: what they say there has to be true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def ran(tool: str, folder: Path) -> dict[str, Any]:
    """Run all parts; return part -> what -> figures."""
    out = folder / "out.json"
    subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", f"tools.gpu.{tool}", "--device", "cpu"),
            *("--patience", "4", "--scratch", str(folder / "scratch"), "--out", str(out)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=1500,
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_two_gpus_on_cpu(tmp_path: Path) -> None:
    found = ran("two_gpus", tmp_path)
    assert {part["ended"]["how"] for part in found.values()} == {"with 0"}
    apart = found["separate"]
    assert apart["twin"]["verdict"] == "Identical"
    assert apart["as colocated on one GPU"]["verdict"] == "Identical"
    assert apart["trainer and engine apart, leg a"]["gate"]["max_abs_diff"] == 0.0
    assert found["engines"]["as one rank and one engine"]["verdict"] == "Identical"
    ranks = {name: row for name, row in found["ranks"].items() if name != "ended"}
    assert len(ranks) == 14
    for name, row in ranks.items():
        if "stock" not in name:
            assert row["as the reference"] == "identical", name
    for trainer in ("fsdp2", "megatron"):
        stock = f"{trainer}, 2 ranks, stock reduction, run"
        assert ranks[f"{stock} 1"]["norms"] == ranks[f"{stock} 2"]["norms"]
        assert ranks[f"{stock} 1 against run 2"] == {"first difference": "none"}
    for algorithm in ("Ring", "Tree"):
        row = found["launches"][f"{algorithm}, 2 launches"]
        assert (row["ranks"], row["different outcomes"], row["nccl chose"]) == (2, 1, [])
        assert row["variables"]["NCCL_ALGO"] == algorithm
        assert row["variables"]["NCCL_NVLS_ENABLE"] == "0"
        assert row["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["launches"]["trainer's variables, from inside"]["variables"]["NCCL_ALGO"] == "Ring"
    for part in ("reference", "separate"):
        roles = found[part]["variables of both roles"]
        assert roles["trainer"] == {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
        assert roles["rollout"] == {}, "an engine on CPU has no use for NCCL"
        facts = found[part]["environment"]
        assert facts["trainer"]["variables"]["NCCL_ALGO"] == "Ring"
        assert facts["rollout"]["rollout-0"]["vllm_config"]["load_format"] == "dummy"
    assert found["float64"]["float32 on 2 ranks against float64"]["holds"]


def test_one_gpu_on_cpu(tmp_path: Path) -> None:
    found = ran("one_gpu", tmp_path)
    assert {part["ended"]["how"] for part in found.values()} == {"with 0"}
    assert len(found["pushes"]["20 pushes over CUDA IPC"]["seconds"]) == 20
    for part in ("shallow", "deep"):
        assert found[part]["as never asleep"]["verdict"] == "Identical"
