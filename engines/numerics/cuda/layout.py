"""How an input must lie in memory before a kernel reads it.

Triton picks the layout of a load, and with it the order of a sum over a row, from what it knows of
pointer and stride. Invariant: what reaches a kernel that reduces a row of floats across threads has
one alignment whatever the caller's view was, so that storage offset and stride cannot be seen in a
result. Products, column sums and integer sums do not depend on that layout and take any view.
"""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes; what `torch` allocates is aligned to more."""


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x` contiguous and starting at a multiple of 16 bytes; a copy only where needed."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def row_major(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with elements of the last dimension next to each other, else as it is."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
