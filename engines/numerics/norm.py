"""RMSNorm: float32 inside, rounded before the weight, as in transformers' Llama and Qwen."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_TILE, block_sum, pad_rows
from engines.numerics.slot_sums import next_op_sums


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `weight * round(x / sqrt(mean(x^2) + eps))`.

    The normalised value is rounded to the dtype of `x` and then multiplied by the weight. There is
    no fused form with a residual: a caller adds first (`add`) and then normalises.

    Args:
        x: `[M, K]`.
        weight: `[K]`, dtype of `x`.
        eps: added to the mean of squares.

    Returns:
        `[M, K]`, dtype of `x`. The gradient of `weight` is summed like that of a bias.
    """
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `1 / sqrt(mean(x^2) + eps)` of float32 rows, `[M, 1]`."""
    # A lone row longer than 32768 would be summed by several threads: never give torch a lone row.
    return torch.rsqrt(pad_rows(x * x, ROW_TILE).mean(-1, keepdim=True) + eps)[: x.shape[0]]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.sums = eps, next_op_sums()
        wide = x.float()
        return (wide * _scale(wide, eps)).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, upstream = x.float(), gradient.float()
        scale = _scale(wide, ctx.eps)
        normalised = wide * scale
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            weighted = upstream * weight.float()
            projection = pad_rows(weighted * normalised, ROW_TILE).mean(-1, keepdim=True)[
                : x.shape[0]
            ]
            of_x = (weighted - normalised * projection).mul_(scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = upstream * normalised.to(x.dtype).float()
            total = block_sum(rows, total=ctx.sums.total(0))
            of_weight = ctx.sums.rounded(0, total, weight.dtype)
        return of_x, of_weight, None
