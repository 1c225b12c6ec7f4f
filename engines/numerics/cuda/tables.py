"""Many tensors in one launch: a table of addresses and sizes on the device.

A launch costs the host tens of microseconds, whatever its size, and a model has hundreds of
tensors. A program finds its tensor by `owner_of` and reads from the table where it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.numerics.cuda.layout import ALIGNMENT


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of integers, one a tensor, and the first program of each tensor, on the device."""

    rows: torch.Tensor
    """int64 `[tensors * fields]`."""
    first: torch.Tensor
    """int64 `[tensors + 1]`, and the number of programs."""
    programs: int


def table_of(rows: Sequence[Sequence[int]], programs: Sequence[int], device: torch.device) -> Table:
    """Send a table to the device, in one copy.

    Args:
        rows: as many integers for each tensor.
        programs: programs of each tensor, at least one.
        device: where the tensors lie.
    """
    first = list(itertools.accumulate(programs, initial=0))
    flat = torch.tensor([*itertools.chain(*rows), *first], dtype=torch.int64).to(device)
    cut = len(flat) - len(first)
    return Table(rows=flat[:cut], first=flat[cut:], programs=first[-1])


def all_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes."""
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
