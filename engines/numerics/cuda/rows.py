"""Sums over rows: fixed blocks of 64 rows, left to right, one thread a column and no atomics.

Source of the order: `engines.numerics.blocks`. A column is summed by one program, row after row, so
that neither the layout of a load nor the launch can be seen in the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.cuda.layout import row_major

_COLUMNS = 128
_UNROLL = 8


@triton.jit(do_not_specialize=["rows", "columns", "block_rows"])
def _column_sum_kernel(
    x_ptr, out_ptr, rows, columns, stride, block_rows, COLUMNS: tl.constexpr, UNROLL: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, block_rows, UNROLL):
        for step in tl.static_range(UNROLL):
            row = block * block_rows + first + step
            mask = inside & (row < rows)
            total += tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + block * columns + column, total.to(out_ptr.dtype.element_ty), mask=inside
    )  # fmt: skip


def _column_sums(
    x: torch.Tensor, *, block_rows: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sum each `block_rows` (a multiple of 8) rows in ascending order; `[blocks, columns]`."""
    rows, columns = x.shape
    blocks = -(-rows // block_rows)
    out = torch.empty(blocks, columns, dtype=dtype, device=x.device)
    if out.numel():
        grid = (blocks, triton.cdiv(columns, _COLUMNS))
        _column_sum_kernel[grid](
            x, out, rows, columns, x.stride(0), block_rows,
            COLUMNS=_COLUMNS, UNROLL=_UNROLL, num_warps=4,
        )  # fmt: skip
    return out


def block_sum(
    rows: torch.Tensor, *, total: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Sum over rows: ascending inside each block of 64 rows, then blocks left to right.

    Args:
        rows: float32 or bfloat16 `[rows, columns]`.
        total: float32 `[columns]` to go on from; None starts from zero. Going on after a multiple
            of 64 rows gives the bits of one call over all rows.
        dtype: of the result: the float32 sum is rounded to it once.

    Returns:
        `[columns]`; trailing zero rows, and whole blocks of them, change no bit.
    """
    blocks = _column_sums(row_major(rows), block_rows=ROW_BLOCK)
    if total is not None:
        blocks = torch.cat([total[None], blocks])
    if not blocks.shape[0]:
        return blocks.new_zeros(rows.shape[1], dtype=dtype)
    block_rows = -(-blocks.shape[0] // _UNROLL) * _UNROLL
    return _column_sums(blocks, block_rows=block_rows, dtype=dtype)[0]
