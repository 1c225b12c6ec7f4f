"""Rows of several groups in one launch: which group a tile of rows belongs to.

Group g has rows `first[g] ... first[g + 1] - 1`, and `first[0]` is 0. Enough for all of them are
`count // TILE + groups` tiles, however the rows are dealt: a number the host knows without asking
the device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_of_tile(tile, first_ptr, groups, TILE: tl.constexpr):
    """Return the group of a tile: the last one with `first // TILE + index <= tile`."""
    low, high = 0, groups
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def owner_of(number, first_ptr, owners):
    """Return the last index with `first[index] <= number`; `first` ascends from zero."""
    low, high = 0, owners
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_ptr + middle) <= number:
            low = middle + 1
        else:
            high = middle
    return low - 1
