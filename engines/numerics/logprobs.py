"""Log-probabilities of chosen tokens, as the sampler sees them, with or without the head.

The definition is `log_softmax(float32(logits) / temperature)`, row by row: what vLLM calls
processed log-probs when no token is cut off. Tokens that are forbidden in a row (end tokens, before
the least length) leave it as if the vocabulary lacked them. `head_logprobs` never holds more logits
than one chunk of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.linear import linear_input_gradient, linear_weight_gradient
from engines.numerics.products import padded_linear
from engines.numerics.slot_sums import next_op_sums

FORBIDDEN_LOGIT = -1e30
"""Its probability is exactly 0 as that of minus infinity is, but 0 times its log is no NaN."""


class Forbidden(NamedTuple):
    """Tokens that cannot be drawn, and the rows in which they cannot."""

    ids: torch.Tensor
    """int64 `[F]`, no id twice."""
    rows: torch.Tensor
    """bool `[M]`."""


def forbid_(
    logits: torch.Tensor, forbidden: Forbidden | None, rows: slice | torch.Tensor
) -> torch.Tensor:
    """Overwrite the logits of forbidden tokens in place, and return the logits.

    The log-probs of all other tokens then have the bits that minus infinity would give them.

    Args:
        logits: `[m, V]`, float32 or bfloat16.
        forbidden: none forbids nothing.
        rows: which `m` of the rows of `forbidden` these are.
    """
    if forbidden is not None:
        kept = logits.index_select(1, forbidden.ids)
        kept = kept.masked_fill(forbidden.rows[rows][:, None], FORBIDDEN_LOGIT)
        logits.index_copy_(1, forbidden.ids, kept)
    return logits


def log_softmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of each row.

    Args:
        logits: float32 `[M, V]`.

    Returns:
        float32 `[M, V]`; each row is a function of that row alone.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"log_softmax_rows: logits are {logits.dtype}; convert to float32 first")
    return torch.log_softmax(logits.contiguous(), dim=-1)


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return the log-prob of one token a row.

    Args:
        logits: `[M, V]`, any float dtype.
        ids: int64 `[M]`.
        temperature: positive; divides the logits in float32.

    Returns:
        float32 `[M]`. The gradient is `(onehot - softmax) * g / temperature` in float32, rounded
        once to the dtype of `logits`.
    """
    return _ChosenLogprobs.apply(logits, ids, temperature)  # type: ignore[no-any-return]


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float,
    chunk_rows: int = 64,
    forbidden: Forbidden | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob of one token a row, and entropy of the row, straight from the hidden state.

    Equal to `chosen_logprobs(linear(hidden, weight), ids)` in all bits, forward and backward. Both
    results carry a gradient. A chunk whose gradients are all zero (prompt or padding rows) is
    skipped: it would add zeros.

    Args:
        hidden: `[M, K]`.
        weight: `[V, K]`, the head; dtype of `hidden`.
        ids: int64 `[M]`.
        temperature: positive; divides the logits in float32.
        chunk_rows: rows of logits held at a time, a multiple of 64; it decides no bit.
        forbidden: tokens without probability; none of `ids` may be one where it is forbidden. The
            gradient of their logits is exactly 0.

    Returns:
        Log-probs and entropies in nats, float32 `[M]` each.
    """
    if chunk_rows < ROW_BLOCK or chunk_rows % ROW_BLOCK:
        raise ValueError(
            f"head_logprobs: chunk_rows is {chunk_rows}; use a multiple of {ROW_BLOCK}"
        )
    return _HeadLogprobs.apply(  # type: ignore[no-any-return]
        hidden, weight, ids, temperature, chunk_rows, forbidden
    )


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return float32 `logits / temperature`; a true division, by the temperature as float32."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one")
    return logits.float() / torch.full((1, 1), temperature, dtype=torch.float32)


def _logits_gradient(
    logprobs: torch.Tensor,
    ids: torch.Tensor,
    of_chosen: torch.Tensor,
    of_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Return the float32 gradient of the logits, `[M, V]`.

    With p the softmax and H its entropy, `d log p[id] / dz = onehot - p` and
    `d H / dz = -p * (log p + H)`, where z is logits / temperature.
    """
    if of_entropy is None or entropy is None:
        gradient = logprobs.exp().mul_(-of_chosen[:, None])
    else:
        factor = (logprobs + entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_chosen[:, None])
        gradient = factor.mul_(logprobs.exp())
    gradient.scatter_add_(1, ids[:, None], of_chosen[:, None])
    return gradient.div_(torch.full((1, 1), temperature, dtype=torch.float32))


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.temperature = temperature
        return log_softmax_rows(_tempered(logits, temperature)).gather(1, ids[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, ids = ctx.saved_tensors
        logprobs = log_softmax_rows(_tempered(logits, ctx.temperature))
        of_logits = _logits_gradient(logprobs, ids, gradient, None, None, ctx.temperature)
        return of_logits.to(logits.dtype), None, None


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ids: torch.Tensor,
        temperature: float,
        chunk_rows: int,
        forbidden: Forbidden | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = torch.empty_like(chosen)
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, min(start + chunk_rows, hidden.shape[0]))
            count = rows.stop - rows.start
            logprobs = _head_chunk(hidden, weight, rows, temperature, forbidden)
            chosen[rows] = logprobs[:count].gather(1, ids[rows, None])[:, 0]
            entropy[rows] = (logprobs.exp() * logprobs).sum(-1).neg_()[:count]
        ctx.save_for_backward(hidden, weight, ids, entropy)
        ctx.temperature, ctx.chunk_rows, ctx.sums = temperature, chunk_rows, next_op_sums()
        ctx.forbidden = forbidden
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_chosen: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, entropy = ctx.saved_tensors
        upstream = torch.zeros_like(entropy) if of_chosen is None else of_chosen
        of_hidden = torch.zeros_like(hidden)
        of_weight = ctx.sums.total(0)
        if of_weight is None:
            of_weight = torch.zeros(weight.shape, dtype=torch.float32)
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, min(start + ctx.chunk_rows, hidden.shape[0]))
            of_entropy_rows = None if of_entropy is None else of_entropy[rows]
            if not upstream[rows].any() and (of_entropy_rows is None or not of_entropy_rows.any()):
                continue
            logprobs = _head_chunk(hidden, weight, rows, ctx.temperature, ctx.forbidden)
            of_logits = _logits_gradient(
                logprobs[: rows.stop - start],
                ids[rows],
                upstream[rows],
                of_entropy_rows,
                entropy[rows],
                ctx.temperature,
            ).to(hidden.dtype)
            of_hidden[rows] = linear_input_gradient((of_logits,), (weight,))
            linear_weight_gradient(of_logits, hidden[rows], total=of_weight)
        return of_hidden, ctx.sums.rounded(0, of_weight, weight.dtype), None, None, None, None


def _head_chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: slice,
    temperature: float,
    forbidden: Forbidden | None,
) -> torch.Tensor:
    """Return float32 log-probs of these rows, `[rows padded to 16, V]`."""
    logits = padded_linear(hidden[rows], weight)
    forbid_(logits[: rows.stop - rows.start], forbidden, rows)
    return log_softmax_rows(_tempered(logits, temperature))
