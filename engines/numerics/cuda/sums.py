"""Sums of squares on the device: float64, rows halved to one number, as on the CPU.

Multiplication and addition of float64 round alike everywhere, so these are the CPU's bits.
"""

from __future__ import annotations

import torch

from engines.numerics.sums import square_tree

_CHUNK = 1 << 26
"""Elements squared at a time, so that float64 copies stay below a gigabyte; it decides no bit."""


@torch.no_grad()
def row_square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each index of the first dimension, float64 `[rows]`."""
    return square_tree(x, chunk=_CHUNK)
