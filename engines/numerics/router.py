"""Which experts a token goes to, and with what weight: softmax, top-k with fixed ties.

All in float32, row by row. Equal probabilities are real (a zero row has nothing else), and `topk`
promises no order among them, so the lowest expert comes first, by a stable sort.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_TILE, pad_rows


def route(
    logits: torch.Tensor, *, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` experts of each row and their weights.

    The weights are the probabilities `softmax(float32(logits))` of the chosen experts, with
    `normalise` divided by their sum, which is added from the largest to the smallest.

    Args:
        logits: `[M, E]`, of `linear(hidden, router weight)`.
        top_k: experts a row, at most E.
        normalise: `norm_topk_prob` of the model.

    Returns:
        Weights, float32 `[M, top_k]`, largest first, and experts, int64 `[M, top_k]`. The weights
        carry a gradient, rounded once to the dtype of `logits`; the choice has none.
    """
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"route: top_k is {top_k}, but there are {logits.shape[1]} experts")
    return _Route.apply(logits, top_k, normalise)  # type: ignore[no-any-return]


def _ordered_row_sum(values: torch.Tensor) -> torch.Tensor:
    """Add the columns of `[M, n]` from left to right; `[M, 1]`."""
    total = values[:, :1].clone()
    for column in range(1, values.shape[1]):
        total += values[:, column : column + 1]
    return total


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        probabilities = torch.softmax(pad_rows(logits.float(), ROW_TILE), dim=-1)[:rows]
        ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        chosen, experts = ordered[:, :top_k].contiguous(), experts[:, :top_k].contiguous()
        total = _ordered_row_sum(chosen)
        ctx.save_for_backward(probabilities, chosen, total, experts)
        ctx.normalise, ctx.dtype = normalise, logits.dtype
        ctx.mark_non_differentiable(experts)
        return chosen / total if normalise else chosen.clone(), experts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        probabilities, chosen, total, experts = ctx.saved_tensors
        if ctx.normalise:
            # w_i = p_i / s: dp_i = (g_i - sum_j g_j w_j) / s
            gradient = (gradient - _ordered_row_sum(gradient * (chosen / total))) / total
        # dz_i = p_i (dp_i - sum_j dp_j p_j), where dp is zero but for the chosen experts
        inner = _ordered_row_sum(gradient * chosen)
        spread = torch.zeros_like(probabilities).scatter_(1, experts, gradient)
        return (probabilities * (spread - inner)).to(ctx.dtype), None, None
