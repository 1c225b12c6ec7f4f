"""Runs `engines.numerics.cuda` on the device, or in Triton's interpreter where there is none.

In the CPU environment `triton` is an empty stand-in, so the kernels cannot even be defined in the
process that runs the suite: there this folder is one test, `test_in_interpreter.py`, which runs all
the others in a process of their own that has the real package. Where the real package is there, the
others are collected as ever.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

IN_INTERPRETER = "test_in_interpreter.py"


def has_triton() -> bool:
    """Whether the real package is there; looked up without importing it."""
    spec = importlib.util.find_spec("triton")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(place, "language", "core.py").is_file() for place in places)


if has_triton():
    collect_ignore = [IN_INTERPRETER]
    if not torch.cuda.is_available():
        # Read when a kernel is defined: before triton and `engines.numerics.cuda` are imported.
        os.environ["TRITON_INTERPRET"] = "1"
else:
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != IN_INTERPRETER
    ]


@pytest.fixture
def device() -> str:
    """Where the kernels run: the device, or the CPU's memory under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
