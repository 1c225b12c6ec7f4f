"""Runs `engines.numerics.cuda` on the device, or in Triton's interpreter where there is none.

Without a device this folder is one test, `test_in_interpreter.py`, which runs all the others in
processes of their own: the interpreter has to be asked for before the first kernel is defined,
which other tests of the suite may have done, and in the CPU environment `triton` is an empty
stand-in, so that none can be. With a device, or with TRITON_INTERPRET=1, the others are collected
as ever.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

IN_INTERPRETER = "test_in_interpreter.py"


def has_triton() -> bool:
    """Whether the real package is there; looked up without importing it."""
    spec = importlib.util.find_spec("triton")
    places = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(place, "language", "core.py").is_file() for place in places)


def add_in_one_order() -> None:
    """Give the interpreter a `tl.dot` whose rows do not depend on where they stand in a tile.

    The interpreter multiplies by numpy's matmul. The BLAS behind it takes other kernels for other
    places of a tile, chosen by the CPU, so a row there has other bits in another place; a device's
    matrix units do not do so. `einsum` adds up the terms of each element in one order.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        left, right = (operand.data.astype(d.data.dtype) for operand in (a, b))
        product = np.einsum("mk,kn->mn", left, right)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if has_triton() and (INTERPRETED or torch.cuda.is_available()):
    collect_ignore = [IN_INTERPRETER]
    if INTERPRETED:
        add_in_one_order()
else:
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != IN_INTERPRETER
    ]


@pytest.fixture
def device() -> str:
    """Where the kernels run: the device, or the CPU's memory under the interpreter."""
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
