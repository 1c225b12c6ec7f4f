"""What the tests of engines share."""

from __future__ import annotations

import pytest

from engines.train.group import trainer_env
from model_specs.recipes.tiny_cpu import recipe

MEGATRON_VARIABLE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.fixture(autouse=True)
def _megatron_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trainer's process starts with and Megatron's deterministic mode asks for."""
    monkeypatch.setenv(MEGATRON_VARIABLE, trainer_env(recipe())[MEGATRON_VARIABLE])
