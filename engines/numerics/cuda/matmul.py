"""Our own matrix products: no split over K, and one chain of additions for every output element.

An element is the sum over K in steps of 16, in order, in one float32 accumulator of the tensor
cores. How many rows and columns a tile holds only says which elements are computed together; that
it decides no bit is measured (`tests/gpu/test_op_laws.py`, and by preflight in every run). The
weight gradient takes rows in blocks of 64, left to right, into one float32 accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.cuda.layout import row_major

_GROUP = 8


@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    a_ptr, b_ptr, bias_ptr, out_ptr, m, n, k, a_row, a_k, b_k, b_column, out_row,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    row_tile = group * GROUP + (pid % (GROUP * columns)) % height
    column_tile = (pid % (GROUP * columns)) // height
    # Places inside of a tile fit 32 bits; only where a tile starts needs 64.
    first_row, first_column = (
        (row_tile * BLOCK_M).to(tl.int64),
        (column_tile * BLOCK_N).to(tl.int64),
    )
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_place = row[:, None] * a_row + inner[None, :] * a_k
    b_place = inner[:, None] * b_k + column[None, :] * b_column
    a_ptr += first_row * a_row
    b_ptr += first_column * b_column
    a_inside, b_inside = (row < m - first_row)[:, None], (column < n - first_column)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptr + a_place, mask=a_inside, other=0.0)
            b = tl.load(b_ptr + b_place, mask=b_inside, other=0.0)
        else:
            a = tl.load(a_ptr + a_place, mask=a_inside & (inner < k - first)[None, :], other=0.0)
            b = tl.load(b_ptr + b_place, mask=b_inside & (inner < k - first)[:, None], other=0.0)
        a_ptr += BLOCK_K * a_k
        b_ptr += BLOCK_K * b_k
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if HAS_BIAS:
        bias_ptr += first_column
        bias = tl.load(bias_ptr + column, mask=column < n - first_column, other=0.0).to(tl.float32)
        total += bias[None, :]
    out_ptr += first_row * out_row + first_column
    tl.store(
        out_ptr + row[:, None] * out_row + column[None, :], total.to(out_ptr.dtype.element_ty),
        mask=a_inside & b_inside,
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _weight_gradient_kernel(
    gradient_ptr, x_ptr, total_ptr, m, n, k, gradient_row, x_row,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    first_output = (tl.program_id(0) * BLOCK_N).to(tl.int64)
    first_inner = (tl.program_id(1) * BLOCK_K).to(tl.int64)
    output, inner, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    total_ptr += first_output * k + first_inner
    place = output[:, None] * k + inner[None, :]
    of_n, of_k = (output < n - first_output)[:, None], (inner < k - first_inner)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if not FRESH:
        total = tl.load(total_ptr + place, mask=of_n & of_k, other=0.0)
    gradient_ptr += first_output
    x_ptr += first_inner
    gradient_place = row[None, :] * gradient_row + output[:, None]
    x_place = row[:, None] * x_row + inner[None, :]
    for first in range(0, m, ROWS):
        present = row < m - first
        gradient = tl.load(
            gradient_ptr + gradient_place, mask=present[None, :] & of_n, other=0.0
        )  # fmt: skip
        x = tl.load(x_ptr + x_place, mask=present[:, None] & of_k, other=0.0)
        gradient_ptr += ROWS * gradient_row
        x_ptr += ROWS * x_row
        total = tl.dot(gradient, x, total, input_precision=PRECISION)
    tl.store(total_ptr + place, total, mask=of_n & of_k)


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements that one program computes, and how; it decides no bit."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Return what Triton takes besides the kernel's own arguments."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def chosen_tile(m: int, n: int, dtype: torch.dtype) -> Tile:
    """Choose a tile for `m` rows and `n` columns: `tools/gpu/bench_tiles.py` says which is fast."""
    if dtype == torch.float32:  # runs on the plain units, whose operands fill registers
        return Tile(64, 64, 32, 4, 2)
    if m <= 256 and n <= 2048:  # decode: narrow tiles, so that there is one for every processor
        return Tile(64, 16, 128, 4, 4)
    if m <= 256 and n < 16384:
        return Tile(64 if m <= 64 else 128, 32, 64, 4, 4)
    if m > 256 and 4096 <= n < 16384:
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 8, 3)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias` (`transposed`) or `x @ weight`.

    Args:
        x: `[M, K]`.
        weight: `[N, K]` if transposed, else `[K, N]`; dtype of `x`.
        bias: `[N]` or None; added in float32 before the one rounding.
        transposed: which of the two.
        tile: None takes `chosen_tile`.

    Returns:
        `[M, N]`, dtype of `x`.
    """
    x, weight = row_major(x), row_major(weight)
    m, k = x.shape
    n = weight.shape[0] if transposed else weight.shape[1]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = tile or chosen_tile(m, n, x.dtype)
    b_k, b_column = (1, weight.stride(0)) if transposed else (weight.stride(0), 1)
    _matmul_kernel[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
        x, weight, bias, out, m, n, k, x.stride(0), 1, b_k, b_column, n,
        HAS_BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner,
        GROUP=_GROUP, EVEN_K=k % tile.inner == 0, PRECISION="ieee", **tile.options(),
    )  # fmt: skip
    return out


def add_weight_gradient(
    total: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    *,
    fresh: bool = False,
    tile: Tile | None = None,
) -> None:
    """Add `gradient.T @ x` to `total` in place, rows in blocks of 64 from the first to the last.

    Args:
        total: float32 `[N, K]`, contiguous.
        gradient: `[M, N]`, gradient of the output.
        x: `[M, K]`, dtype of `gradient`; zero rows change no bit.
        fresh: start from zero: `total` is written and never read.
        tile: elements of `total` that one program computes; None takes the chosen one.
    """
    gradient, x = row_major(gradient), row_major(x)
    (m, n), k = gradient.shape, x.shape[1]
    if not (m and n and k):
        if fresh:
            total.zero_()
        return
    if tile is None:
        tile = Tile(64, 64, 64, 4, 2) if x.dtype == torch.float32 else Tile(128, 128, 64, 8, 3)
    _weight_gradient_kernel[(triton.cdiv(n, tile.rows), triton.cdiv(k, tile.columns))](
        gradient, x, total, m, n, k, gradient.stride(0), x.stride(0), FRESH=fresh,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, ROWS=ROW_BLOCK, PRECISION="ieee",
        **tile.options(),
    )  # fmt: skip
