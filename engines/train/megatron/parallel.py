"""Megatron's parallel state for pure data parallelism, and its deterministic mode, read back.

Invariants: one model replica a rank; what Megatron's own deterministic mode demands is in force
before a model is built, and is reported as it is, not as it was asked for.

    start("cuda")
    facts = determinism_facts(model)
    stop()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state

from model_specs.errors import EngineError

REQUIRED_VARIABLES: Mapping[str, tuple[str, ...]] = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",)}
"""What Megatron's `--deterministic-mode` asserts of the environment on every device."""

CUDA_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}
"""And where the device is a GPU."""


def start(device: str = "cpu") -> None:
    """Initialise Megatron's groups: every rank of the process group is a data-parallel replica.

    Args:
        device: Where the model will be, `cpu` or `cuda`.

    Raises:
        EngineError: A switch that deterministic mode demands is not set.
    """
    check_determinism(device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
    )


def stop() -> None:
    """Forget Megatron's groups."""
    parallel_state.destroy_model_parallel()


def check_determinism(device: str = "cpu") -> None:
    """Require what Megatron's deterministic mode asserts for `device`, before a model is built.

    Raises:
        EngineError: Naming every switch that is not as it has to be.
    """
    required = dict(REQUIRED_VARIABLES)
    if device == "cuda":
        required |= CUDA_VARIABLES
    wrong = [
        f"{name} is {os.environ.get(name)!r}, not {' or '.join(map(repr, values))}"
        for name, values in required.items()
        if os.environ.get(name) not in values
    ]
    if not torch.are_deterministic_algorithms_enabled():
        wrong.append("torch.use_deterministic_algorithms is off")
    if wrong:
        raise EngineError(
            f"Megatron's deterministic mode cannot be kept: {'; '.join(wrong)}; the variables of "
            "engines.train.group.trainer_env must be set before the process starts"
        )


def determinism_facts(model: Any) -> dict[str, Any]:
    """Return what is in force: version, mode, and the sizes of all groups."""
    return {
        "version": megatron.core.__version__,
        "deterministic_mode": model.config.deterministic_mode,
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
        "variables": {
            name: os.environ.get(name) for name in sorted({**REQUIRED_VARIABLES, **CUDA_VARIABLES})
        },
    }
