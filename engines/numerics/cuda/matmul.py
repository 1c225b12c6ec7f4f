"""Our own matrix products: no split over K, and one chain of additions for every output element.

An element is the sum over K in order, in one float32 accumulator: bfloat16 in steps of 16 on the
tensor cores, float32 on the plain units. How many rows and columns a tile holds only says which
elements are computed together; that it decides no bit is measured (`tests/gpu/test_op_laws.py`, and
by preflight in every run). The weight gradient takes rows in blocks of 64, left to right, into one
float32 accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@triton.jit
def _input_gradient_part(
    gradient_ptr, weight_ptr, m, n, k, gradient_row, weight_row, first_row, first_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of `gradient @ weight`, rounded and taken back to float32."""
    row, column, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    gradient_place = row[:, None] * gradient_row + inner[None, :]
    weight_place = inner[:, None] * weight_row + column[None, :]
    gradient_ptr += first_row * gradient_row
    weight_ptr += first_column
    of_rows, of_columns = (row < m - first_row)[:, None], (column < k - first_column)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, n, BLOCK_K):
        of_gradient, of_weight = of_rows, of_columns
        if not EVEN:
            of_gradient = of_rows & (inner < n - first)[None, :]
            of_weight = (inner < n - first)[:, None] & of_columns
        gradient = tl.load(gradient_ptr + gradient_place, mask=of_gradient, other=0.0)
        weight = tl.load(weight_ptr + weight_place, mask=of_weight, other=0.0)
        gradient_ptr += BLOCK_K
        weight_ptr += BLOCK_K * weight_row
        total = tl.dot(gradient, weight, total, input_precision=PRECISION)
    return total.to(weight_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["m"])
def _input_gradient_kernel(
    gradient_0, weight_0, n_0, gradient_row_0, weight_row_0,
    gradient_1, weight_1, n_1, gradient_row_1, weight_row_1,
    gradient_2, weight_2, n_2, gradient_row_2, weight_row_2,
    out_ptr, m, k, HAS_THIRD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first_row = (tl.program_id(0) * BLOCK_M).to(tl.int64)
    first_column = (tl.program_id(1) * BLOCK_N).to(tl.int64)
    total = _input_gradient_part(
        gradient_0, weight_0, m, n_0, k, gradient_row_0, weight_row_0, first_row, first_column,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    total += _input_gradient_part(
        gradient_1, weight_1, m, n_1, k, gradient_row_1, weight_row_1, first_row, first_column,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PRECISION,
    )  # fmt: skip
    if HAS_THIRD:
        total += _input_gradient_part(
            gradient_2, weight_2, m, n_2, k, gradient_row_2, weight_row_2, first_row, first_column,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, PRECISION,
        )  # fmt: skip
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    tl.store(
        out_ptr + row[:, None] * k + column[None, :], total.to(out_ptr.dtype.element_ty),
        mask=(row < m)[:, None] & (column < k)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["m"])
def _weight_gradient_kernel(
    gradient_ptr, x_ptr, total_ptr, out_ptr, m, n, k, gradient_row, x_row,
    FRESH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    first_output = (tl.program_id(0) * BLOCK_N).to(tl.int64)
    first_inner = (tl.program_id(1) * BLOCK_K).to(tl.int64)
    output, inner, row = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    total_ptr += first_output * k + first_inner
    out_ptr += first_output * k + first_inner
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
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=of_n & of_k)


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
        x, weight, None if bias is None else bias.contiguous(), out, m, n, k,
        x.stride(0), 1, b_k, b_column, n,
        HAS_BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner,
        GROUP=_GROUP, EVEN_K=k % tile.inner == 0, PRECISION="ieee", **tile.options(),
    )  # fmt: skip
    return out


def summed_input_gradient(
    gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *, tile: Tile | None = None
) -> torch.Tensor:
    """Return the gradient of an input that two or three matrices share, by one launch.

    Each product is rounded, the products are added left to right in float32, and the sum is
    rounded once: the bits of one `matmul` a matrix and the sum of their results.

    Args:
        gradients: each `[M, N_i]`, gradients of the outputs.
        weights: each `[N_i, K]`, dtype of the gradients.
        tile: None takes `chosen_tile`, as far as two sums fit the registers.

    Returns:
        `[M, K]`, dtype of the gradients.
    """
    gradients, weights = [*map(row_major, gradients)], [*map(row_major, weights)]
    m, k = gradients[0].shape[0], weights[0].shape[1]
    out = torch.empty(m, k, dtype=gradients[0].dtype, device=gradients[0].device)
    if not out.numel():
        return out
    tile = tile or chosen_tile(m, k, out.dtype)
    if tile.columns > 128:
        tile = Tile(128, 128, 64, 8, 3)
    matrices = [
        (gradient, weight, weight.shape[0], gradient.stride(0), weight.stride(0))
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
    _input_gradient_kernel[(triton.cdiv(m, tile.rows), triton.cdiv(k, tile.columns))](
        *matrices[0], *matrices[1], *matrices[-1], out, m, k, HAS_THIRD=len(matrices) == 3,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.inner, PRECISION="ieee",
        EVEN=all(matrix[2] % tile.inner == 0 for matrix in matrices), **tile.options(),
    )  # fmt: skip
    return out


def add_weight_gradient(
    total: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    fresh: bool = False,
    tile: Tile | None = None,
) -> None:
    """Write `total + gradient.T @ x`, rows in blocks of 64 from the first to the last.

    Args:
        total: float32 `[N, K]`, contiguous.
        gradient: `[M, N]`, gradient of the output.
        x: `[M, K]`, dtype of `gradient`; zero rows change no bit.
        out: `[N, K]`, contiguous, of any dtype: where the sum is written, rounded once; None
            changes `total` in place.
        fresh: start from zero: `total` is never read, and only its shape counts.
        tile: elements of `total` that one program computes; None takes the chosen one.
    """
    gradient, x = row_major(gradient), row_major(x)
    (m, n), k = gradient.shape, x.shape[1]
    out = total if out is None else out
    if not (m and n and k):
        if fresh:
            out.zero_()
        elif out is not total:
            out.copy_(total)
        return
    if tile is None:
        tile = Tile(64, 64, 64, 4, 2) if x.dtype == torch.float32 else Tile(128, 128, 64, 8, 3)
    _weight_gradient_kernel[(triton.cdiv(n, tile.rows), triton.cdiv(k, tile.columns))](
        gradient, x, total, out, m, n, k, gradient.stride(0), x.stride(0), FRESH=fresh,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, ROWS=ROW_BLOCK, PRECISION="ieee",
        **tile.options(),
    )  # fmt: skip
