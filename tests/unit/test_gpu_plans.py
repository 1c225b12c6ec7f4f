"""The plans of measurements on a GPU: every command names things that are there.

Device time is short, and a flag that has been renamed would be found only there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model_specs.recipes.gsm8k_smollm2_135m import recipe

ROOT = Path(__file__).resolve().parents[2]
PLANS = sorted((ROOT / "tools" / "gpu").glob("plan_*.json"))
SHORT_FORMS = {"numerics", "reward", "data"}


def parts(plan: Path) -> list[tuple[str, list[str]]]:
    """Name and command of every part."""
    phases = json.loads(plan.read_text())["phases"]
    return [(p["name"], p["command"]) for phase in phases for lane in phase for p in lane]


def names(value: dict[str, Any], prefix: str = "") -> set[str]:
    """Dotted names of all fields of a dumped spec."""
    found = {prefix + name for name in value}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found |= names(inner, f"{prefix}{name}.")
    return found


def faults(command: list[str]) -> list[str]:
    """What a command names and is not there."""
    if command[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in command[1:] if "=" not in word and word not in targets]
    module = "flows.cli" if command[0] == "lockstep" else command[command.index("-m") + 1]
    if module == "pytest":
        paths = [word for word in command if word.startswith("tests/")]
        return [path for path in paths if not (ROOT / path).exists()]
    source = ROOT / (module.replace(".", "/") + ".py")
    if not source.is_file():
        return [module]
    text = source.read_text()
    flags = [word for word in command if word.startswith("--")]
    known = set(re.findall(r'"(--[\w-]+)"', text))
    if module == "flows.cli":  # made from the parameters' names
        known = {"--set"} | {
            f"--{name.replace('_', '-')}"
            for name in re.findall(r"^    (\w+): ", text, re.MULTILINE)
        }
    fields = {*names(recipe().model_dump()), *SHORT_FORMS}
    settings = [
        command[index + 1].partition("=")[0]
        for index, word in enumerate(command)
        if word == "--set"
    ]
    return [flag for flag in flags if flag not in known] + [
        name for name in settings if name not in fields
    ]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_every_command_names_modules_flags_and_fields_that_exist(plan: Path) -> None:
    found = {name: faults(command) for name, command in parts(plan)}
    assert found
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_a_phase_fits_into_a_call_of_ten_minutes(plan: Path) -> None:
    for phase in json.loads(plan.read_text())["phases"]:
        assert max(sum(part["limit_s"] for part in lane) for lane in phase) <= 590


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (["python3", "-m", "tools.gpu.bench_vllm", "aligned", "--round", "2"], ["--round"]),
        (["python3", "-m", "tools.gpu.bench_gone"], ["tools.gpu.bench_gone"]),
        (["python3", "-m", "pytest", "tests/gpu/test_gone.py"], ["tests/gpu/test_gone.py"]),
        (["make", "test-gone", "TEST_WORKERS=2"], ["test-gone"]),
        (["lockstep", "run", "x", "--devices", "cuda"], ["--devices"]),
        (
            ["python3", "-m", "flows.cli", "run", "x", "--set", "plan.steps=1", "--run-ids", "a"],
            ["--run-ids", "plan.steps"],
        ),
    ],
)
def test_a_name_that_is_gone_is_found(command: list[str], wrong: list[str]) -> None:
    assert faults(command) == wrong
