"""Token embedding: an exact look-up forward; backward, each token's rows added in ascending order.

Rows are sorted by token (a stable sort), and one program adds the rows of one token, from the first
to the last, in float32: no two programs write to one place, and there are no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.layout import row_major
from engines.numerics.slot_sums import next_op_sums

_COLUMNS = 256
_UNROLL = 8


@triton.jit
def _gather_sum_kernel(
    gradient_ptr, order_ptr, token_ptr, first_ptr, count_ptr, out_ptr, columns, stride,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    first = tl.load(first_ptr + index)
    count = tl.load(count_ptr + index)
    token = tl.load(token_ptr + index)
    total = tl.load(out_ptr + token * columns + column, mask=inside, other=0.0)
    for begin in range(0, count, UNROLL):
        for step in tl.static_range(UNROLL):
            present = begin + step < count
            row = tl.load(order_ptr + first + begin + step, mask=present, other=0)
            value = tl.load(gradient_ptr + row * stride + column, mask=inside & present, other=0.0)
            total += value.to(tl.float32)
    tl.store(out_ptr + token * columns + column, total, mask=inside)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `weight[ids]`.

    Backward: the gradients of one token are added in float32 in ascending row order and rounded
    once to the dtype of `weight`; rows of zeros change no bit.

    Args:
        ids: int64 `[M]`.
        weight: `[V, H]`.
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
        gradient = row_major(gradient)
        out = ctx.sums.total(0)
        if out is None:
            out = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        if ids.shape[0]:
            by_token, order = torch.sort(ids, stable=True)
            tokens, counts = torch.unique_consecutive(by_token, return_counts=True)
            firsts = counts.cumsum(0) - counts
            columns = gradient.shape[1]
            _gather_sum_kernel[(tokens.shape[0], triton.cdiv(columns, _COLUMNS))](
                gradient, order, tokens, firsts, counts, out, columns, gradient.stride(0),
                COLUMNS=_COLUMNS, UNROLL=_UNROLL, num_warps=4,
            )  # fmt: skip
        return None, ctx.sums.rounded(0, out, ctx.dtype)
