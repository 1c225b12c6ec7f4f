"""Sums whose value does not depend on order, sharding, padding or threads.

Where a sum ends in one number it is the exactly rounded one (`math.fsum`), so that no order is left
to agree on. Where it runs over whole tensors it is a balanced binary tree in the order given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def ordered_sum(values: torch.Tensor) -> float:
    """Return the exactly rounded sum of all elements.

    Args:
        values: any float dtype and shape; each value is exact as float64.

    Returns:
        The float64 nearest to the true sum, infinite where that is out of range; NaN where
        infinities of both signs meet.
    """
    numbers = values.detach().double().flatten().tolist()
    try:
        return math.fsum(numbers)
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:  # a sum on the way leaves float64; the whole one may not
        special = [number for number in numbers if not math.isfinite(number)]
        if special:
            return sum(special)
        exact = sum(map(Fraction, numbers))
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf


def token_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the exactly rounded sum of per-token values, with a gradient of one for each.

    Args:
        values: float32 `[n]`; zeros for rows that do not count change nothing.

    Returns:
        float64 scalar.
    """
    return _TokenSum.apply(values)  # type: ignore[no-any-return]


def row_square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each index of the first dimension.

    Squares are float64; each row, filled with zeros to a power of two, is halved until one number
    is left. A shard that owns whole rows gives the same numbers as the whole tensor.

    Args:
        x: `[rows, ...]`; of a 1-D tensor every element is a row. Any float dtype.

    Returns:
        float64 `[rows]`; `ordered_sum` of them over all tensors is the squared gradient norm.
    """
    return square_tree(x, chunk=_CHUNK)


def many_row_square_sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `row_square_sums` of each of many tensors, on one device."""
    return [row_square_sums(tensor) for tensor in tensors]


_CHUNK = 1 << 17
"""Elements squared at a time, so that float64 copies stay small; it decides no bit."""


def square_tree(x: torch.Tensor, *, chunk: int) -> torch.Tensor:
    """Return `row_square_sums` of `x`, with `chunk` elements squared at a time."""
    rows = x.detach().reshape(x.shape[0], -1) if x.numel() else x.new_zeros(x.shape[0], 1)
    width = 1 << (rows.shape[1] - 1).bit_length()
    parts = [_row_tree(part, width) for part in rows.split(max(1, chunk // width))]
    return torch.cat(parts)


def _row_tree(rows: torch.Tensor, width: int) -> torch.Tensor:
    squares = F.pad(rows.double().square_(), (0, width - rows.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares[:, 0]


def tree_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape by a balanced binary tree, neighbours first.

    Args:
        tensors: at least one; an odd one out moves up a level unchanged.

    Returns:
        Shape and dtype of the tensors; the only tensor itself where there is one.
    """
    if not tensors:
        raise ValueError("tree_sum: no tensors were given")
    level = list(tensors)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class _TokenSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = values.shape, values.dtype
        return torch.tensor(ordered_sum(values), dtype=torch.float64, device=values.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(ctx.dtype).expand(ctx.shape).contiguous()
