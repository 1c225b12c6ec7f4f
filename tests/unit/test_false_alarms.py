"""The tool that counts false alarms calls a run green only when nothing at all is wrong with it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.provenance.test_diff import flip_tensor, write_leg


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/false_alarms.py as a module."""
    path = Path(__file__).resolve().parents[2] / "tools" / "false_alarms.py"
    specification = importlib.util.spec_from_file_location("false_alarms", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["false_alarms"] = module
    specification.loader.exec_module(module)
    return module


def leg(tool: ModuleType, folder: Path, **other: Any) -> Any:
    given = {"verdict": "Aligned", "reason": "", "num_tokens": 9, "max_abs_diff": 0.0, **other}
    return tool.Leg(folder=str(folder), **given)


def test_two_equal_aligned_legs_are_green(tool: ModuleType, tmp_path: Path) -> None:
    pair = [leg(tool, write_leg(tmp_path / name)) for name in "ab"]
    green, said = tool.judge(pair)
    assert green, said
    assert said.startswith("Identical: 3 steps")


@pytest.mark.parametrize("verdict", ["Misaligned", "Vacuous"])
def test_a_leg_that_is_not_aligned_is_red(tool: ModuleType, tmp_path: Path, verdict: str) -> None:
    pair = [leg(tool, write_leg(tmp_path / name)) for name in "a"]
    pair.append(leg(tool, write_leg(tmp_path / "b"), verdict=verdict, reason="why"))
    green, said = tool.judge(pair)
    assert not green
    assert f"{verdict}: why" in said


def test_two_legs_that_differ_are_red(tool: ModuleType, tmp_path: Path) -> None:
    other = write_leg(tmp_path / "b", change=flip_tensor("grads", "layers.2.w", 1, 0))
    green, said = tool.judge([leg(tool, write_leg(tmp_path / "a")), leg(tool, other)])
    assert not green
    assert said.startswith("Diverged: first difference at step 2 update 0 grads layers.2.w")


def test_a_ledger_that_does_not_verify_is_red(tool: ModuleType, tmp_path: Path) -> None:
    legs = [leg(tool, write_leg(tmp_path / name)) for name in "ab"]
    side = tmp_path / "b" / "digests" / "step-000001-0.json"
    side.write_text(side.read_text(encoding="utf-8").replace("layers.2.w", "layers.3.w", 1))
    green, said = tool.judge(legs)
    assert not green
    assert "its side file gives" in said
