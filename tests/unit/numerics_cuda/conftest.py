"""Runs `engines.numerics.cuda` on the device, or in Triton's interpreter where there is none.

Where `triton` is only an empty stand-in (the CPU environment) nothing can run: each test is then
reported as skipped, with the reason.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def has_triton() -> bool:
    """Whether the real package is there; looked up without importing it."""
    spec = importlib.util.find_spec("triton")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(place, "language", "core.py").is_file() for place in places)


if has_triton() and not torch.cuda.is_available():
    # Read when a kernel is defined, so before triton and `engines.numerics.cuda` are imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder where there is no Triton to run or interpret a kernel."""
    if has_triton():
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(
                pytest.mark.skip(reason="not run: triton is an empty stand-in in this environment")
            )


@pytest.fixture
def device() -> str:
    """Where the kernels run: the device, or the CPU's memory under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
