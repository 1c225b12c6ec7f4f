"""What tests in this process need before CUDA starts, and give back afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from engines.train.group import trainer_env
from model_specs.recipes.tiny_cpu import recipe

# Read when cuBLAS is first used: a trainer in this process asks torch for deterministic algorithms,
# and torch then refuses matrix products without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")


@pytest.fixture(autouse=True)
def _megatrons_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's deterministic mode asks for, as a trainer's own process starts with it."""
    variables = trainer_env(recipe())
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO"):
        monkeypatch.setenv(name, variables[name])


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    """A trainer in this process switches torch to deterministic algorithms for good."""
    enabled = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = filled
