"""Which experts a token goes to, and with what weight; one program a row, all in float32.

The normaliser is a sum of whole numbers, as in `engines.numerics.cuda.logprobs`. The largest
probability is taken `top_k` times, each time the lowest expert that has it, so ties are fixed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.layout import power_of_two
from engines.numerics.cuda.logprobs import UNITS


@triton.jit
def _route_kernel(
    logits_ptr, probability_ptr, weight_ptr, expert_ptr, columns,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits_ptr + row * columns + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    term = tl.exp(x - tl.max(x, axis=0))
    total = (tl.sum((term * UNITS).to(tl.int64), axis=0).to(tl.float64) / UNITS).to(tl.float32)
    # NaN and plus infinity have no place in a sum of integers: they make the whole row NaN.
    unusual = tl.max(tl.where(x < float("inf"), 0, 1), axis=0)
    total = tl.where(unusual > 0, float("nan"), total)
    probability = tl.div_rn(term, total + tl.zeros([BLOCK], tl.float32))
    tl.store(probability_ptr + row * columns + column, probability, mask=inside)
    # Of a row of NaN the first experts are taken: distinct, and in range.
    left = tl.where(probability >= 0, probability, 2.0)
    left = tl.where(inside, left, -1.0)
    slot = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], tl.float32)
    experts = tl.zeros([SLOTS], tl.int32)
    largest_first = 0.0
    for index in tl.static_range(TOP_K):
        expert = tl.min(tl.where(left == tl.max(left, axis=0), column, BLOCK), axis=0)
        chosen = tl.sum(tl.where(column == expert, probability, 0.0), axis=0)
        left = tl.where(column == expert, -1.0, left)
        largest_first += chosen
        weights = tl.where(slot == index, chosen, weights)
        experts = tl.where(slot == index, expert, experts)
    if NORMALISE:
        weights = tl.div_rn(weights, largest_first + tl.zeros([SLOTS], tl.float32))
    place, present = row * TOP_K + slot, slot < TOP_K
    tl.store(weight_ptr + place, weights, mask=present)
    tl.store(expert_ptr + place, experts.to(tl.int64), mask=present)


@triton.jit
def _route_backward_kernel(
    probability_ptr, expert_ptr, gradient_ptr, out_ptr, columns,
    TOP_K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    probability = tl.load(probability_ptr + row * columns + column, mask=inside, other=0.0)
    total, projection = 0.0, 0.0
    if NORMALISE:
        # w_i = p_i / s: dp_i = (g_i - sum_j g_j w_j) / s
        for slot in tl.static_range(TOP_K):
            expert = tl.load(expert_ptr + row * TOP_K + slot)
            total += tl.load(probability_ptr + row * columns + expert)
        for slot in tl.static_range(TOP_K):
            expert = tl.load(expert_ptr + row * TOP_K + slot)
            chosen = tl.load(probability_ptr + row * columns + expert)
            projection += tl.load(gradient_ptr + row * TOP_K + slot) * tl.div_rn(chosen, total)
    # dz_i = p_i (dp_i - sum_j dp_j p_j), where dp is zero but for the chosen experts
    spread = tl.zeros([BLOCK], tl.float32)
    inner = 0.0
    for slot in tl.static_range(TOP_K):
        expert = tl.load(expert_ptr + row * TOP_K + slot)
        of_chosen = tl.load(gradient_ptr + row * TOP_K + slot)
        if NORMALISE:
            of_chosen = tl.div_rn(of_chosen - projection, total)
        spread = tl.where(column == expert, of_chosen, spread)
        inner += of_chosen * tl.load(probability_ptr + row * columns + expert)
    of_logits = probability * (spread - inner)
    tl.store(out_ptr + row * columns + column, of_logits.to(out_ptr.dtype.element_ty), mask=inside)


def route(
    logits: torch.Tensor, *, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `top_k` experts of each row and their weights; see `engines.numerics.route`.

    Args:
        logits: `[M, E]`, float32 or bfloat16.
        top_k: experts a row, at most E.
        normalise: divide the weights by their sum, added from the largest to the smallest.

    Returns:
        Weights, float32 `[M, top_k]`, largest first, and experts, int64 `[M, top_k]`.
    """
    if not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"route: top_k is {top_k}, but there are {logits.shape[1]} experts")
    return _Route.apply(logits, top_k, normalise)  # type: ignore[no-any-return]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, top_k: int, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        rows, columns = logits.shape
        probabilities = torch.empty_like(logits, dtype=torch.float32)
        weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
        experts = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
        if rows:
            _route_kernel[(rows,)](
                logits, probabilities, weights, experts, columns,
                TOP_K=top_k, SLOTS=power_of_two(top_k), NORMALISE=normalise,
                BLOCK=power_of_two(columns), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        ctx.save_for_backward(probabilities, experts)
        ctx.normalise, ctx.dtype = normalise, logits.dtype
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        probabilities, experts = ctx.saved_tensors
        rows, columns = probabilities.shape
        out = torch.empty_like(probabilities, dtype=ctx.dtype)
        if rows:
            _route_backward_kernel[(rows,)](
                probabilities, experts, gradient.contiguous(), out, columns,
                TOP_K=experts.shape[1], NORMALISE=ctx.normalise, BLOCK=power_of_two(columns),
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return out, None, None
