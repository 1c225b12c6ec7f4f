"""From hidden states to log-probs of a slot's completion tokens; shared by all trainers.

logprobs, entropy = scored_logprobs(hidden, head_weight, slot, temperature=0.7)
"""

from __future__ import annotations

from typing import Any

import torch

from engines import numerics
from engines.train.slots import PackedSlot


def scored_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, slot: PackedSlot, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of each completion token of a slot, in order.

    Args:
        hidden: [M, K], after the last norm.
        weight: [V, K], the output head; dtype of `hidden`.
        slot: Says which rows are scored for which token.
        temperature: Of the distribution, softmax(logits / temperature).

    Returns:
        (log-probs, entropies), float32 [T] each, in nats.
    """
    logprobs, entropy = numerics.head_logprobs(
        _CollectRows.apply(hidden, slot),
        weight,
        slot.targets,
        temperature=temperature,
        forbidden=slot.forbidden,
    )
    return logprobs.index_select(0, slot.head_rows), entropy.index_select(0, slot.head_rows)


class _CollectRows(torch.autograd.Function):
    """[M, K] -> [H, K]: scored rows to their head rows, zeros elsewhere; exact both ways."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, slot: PackedSlot) -> torch.Tensor:
        ctx.slot, ctx.num_rows = slot, hidden.shape[0]
        collected = hidden.new_zeros(slot.num_head_rows, hidden.shape[1])
        return collected.index_copy_(0, slot.head_rows, hidden.index_select(0, slot.scored_rows))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        rows = gradient.index_select(0, ctx.slot.head_rows)
        spread = gradient.new_zeros(ctx.num_rows, gradient.shape[1])
        return spread.index_copy_(0, ctx.slot.scored_rows, rows), None
