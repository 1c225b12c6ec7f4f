"""RMSNorm: float32 inside, rounded before the weight; one program a row.

A row is contiguous and aligned when it reaches the kernel, so that its sum of squares is added in
one order for a given width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.layout import aligned, power_of_two
from engines.numerics.cuda.rows import block_sum
from engines.numerics.slot_sums import next_op_sums

_WARPS = 4


@triton.jit
def _row_scale(x, columns, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / columns + eps))


@triton.jit(do_not_specialize=["columns"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, summed_ptr, out_ptr, columns, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * _row_scale(wide, columns, eps)).to(x.dtype)
    tl.store(out_ptr + row + column, (normed.to(tl.float32) * weight).to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["columns"])
def _norm_backward_kernel(
    x_ptr, weight_ptr, gradient_ptr, of_x_ptr, of_weight_ptr, columns, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    scale = _row_scale(wide, columns, eps)
    normed = wide * scale
    weighted = gradient * weight
    projection = tl.sum(weighted * normed, axis=0) / columns
    of_x = (weighted - normed * projection) * scale
    tl.store(of_x_ptr + row + column, of_x.to(x.dtype), mask=inside)
    rounded = normed.to(x.dtype).to(tl.float32)
    tl.store(of_weight_ptr + row + column, gradient * rounded, mask=inside)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm and what was normed, both like `x`."""
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"rms_norm: x is {tuple(x.shape)} and the weight {tuple(weight.shape)}; rows of one "
            "width are needed, and a weight for each column"
        )
    x = aligned(x)
    out = torch.empty_like(x)
    summed = x
    if residual is not None:
        residual, summed = aligned(residual), torch.empty_like(x)
    if x.shape[0]:
        _norm_kernel[(x.shape[0],)](
            x, residual, aligned(weight), summed, out, x.shape[1], eps,
            HAS_RESIDUAL=residual is not None, BLOCK=power_of_two(x.shape[1]), num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, summed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * round(x / sqrt(mean(x^2) + eps))`; see `engines.numerics.rms_norm`.

    Args:
        x: `[M, K]`, float32 or bfloat16.
        weight: `[K]`, dtype of `x`.
        eps: added to the mean of squares.
    """
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


@torch.no_grad()
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual` with one launch; no gradient.

    The sum is rounded to the dtype of `x` before it is normed: bit for bit `add`, then `rms_norm`.

    Args:
        x: `[M, K]`.
        residual: `[M, K]`, dtype of `x`.
        weight: `[K]`, dtype of `x`.
        eps: added to the mean of squares.
    """
    return _launch(x, residual, weight, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.sums = eps, next_op_sums()
        return _launch(x, None, weight, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = (aligned(saved) for saved in ctx.saved_tensors)
        of_x = torch.empty_like(x)
        of_weight = torch.empty_like(x, dtype=torch.float32)
        if x.shape[0]:
            _norm_backward_kernel[(x.shape[0],)](
                x, weight, aligned(gradient), of_x, of_weight, x.shape[1], ctx.eps,
                BLOCK=power_of_two(x.shape[1]), num_warps=_WARPS,
            )  # fmt: skip
        dtype = ctx.sums.dtype_of_sum(weight.dtype)
        total = block_sum(of_weight, total=ctx.sums.total(0), dtype=dtype)
        return of_x, ctx.sums.rounded(0, total, weight.dtype), None
