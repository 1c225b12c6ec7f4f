"""Fixed row blocks: the two constants from which all invariance follows.

A kernel chooses its order of additions from the shape it is given. So no op here hands a kernel a
row count that depends on the batch: what is computed per row runs on a multiple of `ROW_TILE` rows,
and what is summed over rows is summed in blocks of `ROW_BLOCK` rows that start at row 0, left to
right. Callers align each sequence to a multiple of `ROW_BLOCK` rows and fill with zero rows; then
blocks belong to one sequence each, and a sum over a packed slot is the sum over its sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_TILE = 16
"""Rows of a matrix product are padded to a multiple of this, so that a row's bits are its own."""

ROW_BLOCK = 64
"""Rows that are summed together before the running fp32 sum is added to."""


def pad_rows(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `x` contiguous, with zero rows up to a multiple of `multiple` rows.

    Args:
        x: `[rows, ...]`, any dtype and stride.
        multiple: rows of the result are the next multiple of this.

    Returns:
        `[ceil(rows / multiple) * multiple, ...]`; `x` itself where nothing has to change.
    """
    missing = -x.shape[0] % multiple
    if not missing:
        return x.contiguous()
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def block_sum(rows: torch.Tensor, *, total: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over rows: a balanced tree inside each block of 64 rows, blocks left to right.

    The tree adds the lower half of a block to its upper half, six times. It is written out because
    the order inside `torch.sum` is torch's to change.

    Args:
        rows: float32 `[rows, columns]`.
        total: float32 `[columns]` to go on from, changed in place; None starts from zero. Going on
            after a multiple of 64 rows gives the bits of one call over all rows.

    Returns:
        float32 `[columns]`; trailing zero rows, and whole blocks of them, change no bit.
    """
    blocks = pad_rows(rows, ROW_BLOCK).view(-1, ROW_BLOCK, rows.shape[1])
    width = ROW_BLOCK
    while width > 1:
        width //= 2
        blocks = blocks[:, :width] + blocks[:, width:]
    if total is None:
        total = rows.new_zeros(rows.shape[1])
    for partial in blocks[:, 0].unbind(0):
        total += partial
    return total
