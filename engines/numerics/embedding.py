"""Token embedding: an exact look-up forward, a fixed order of additions backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.slot_sums import next_op_sums


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `weight[ids]`.

    Backward: within each block of 64 rows the gradients of one token are added in float32 in
    ascending row order, blocks are added left to right, and the sum is rounded once to the dtype of
    `weight`.

    Args:
        ids: int64 `[M]`.
        weight: `[V, H]`.

    Returns:
        `[M, H]`, dtype of `weight`.
    """
    return _Embedding.apply(ids, weight)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.sums = weight.shape, weight.dtype, next_op_sums()
        return weight.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (ids,) = ctx.saved_tensors
        total = ctx.sums.total(0)
        if total is None:
            total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        blocks = zip(ids.split(ROW_BLOCK), gradient.float().split(ROW_BLOCK), strict=True)
        for block_ids, rows in blocks:
            tokens, place = block_ids.unique(return_inverse=True)
            # On the CPU index_add_ is a serial loop over rows, whatever the number of threads.
            partial = rows.new_zeros(len(tokens), rows.shape[1]).index_add_(0, place, rows)
            total.index_add_(0, tokens, partial)
        return None, ctx.sums.rounded(0, total, ctx.dtype)
