"""Log-probabilities of chosen tokens, without a second copy of the logits.

A row's normaliser is a sum of terms in [0, 1], the largest of which is 1. They are added as whole
numbers of 2^-40: integer addition has no order, so neither the dtype the logits came in nor the
layout of a load can be seen in the result. The error is at most the number of columns times 2^-40.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.cuda.layout import row_major
from engines.numerics.cuda.linear import linear_input_gradient, linear_weight_gradient
from engines.numerics.cuda.matmul import matmul
from engines.numerics.logprobs import Forbidden, forbid_
from engines.numerics.slot_sums import next_op_sums

_BLOCK = 4096
_CHUNK_ROWS = 2048
"""Fewest rows of logits that `head_logprobs` holds at a time; it decides no bit."""

_MANY_ROWS = 1024
"""From here on a row needs no more than one program; it decides no bit."""
_SPANS = 8
"""Programs of a row below that."""

UNITS = tl.constexpr(1099511627776.0)
"""2^40 units are 1."""


@triton.jit
def _tempered(x_ptr, temperature):
    return tl.div_rn(tl.load(x_ptr).to(tl.float32), temperature)


@triton.jit
def _largest(place, begin, end, BLOCK: tl.constexpr):
    """Return the largest element of a span, and whether one is NaN or plus infinity."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    unusual = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < end, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
        unusual |= tl.where(x < float("inf"), 0, 1)
    return tl.max(largest, axis=0), tl.max(unusual, axis=0)


@triton.jit
def _sums(place, begin, end, maximum, temperature, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sums over a span, in units: of the terms, and of each times its logarithm."""
    total = tl.zeros([BLOCK], tl.int64)
    weighted = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < end, other=float("-inf")).to(tl.float32)
        below = tl.div_rn(x, temperature + tl.zeros([BLOCK], tl.float32)) - maximum
        term = tl.exp(below)
        total += (term * UNITS).to(tl.int64)
        if HAS_ENTROPY:
            scaled = tl.where(below > float("-inf"), term * below, 0.0)
            weighted += (scaled * UNITS).to(tl.int64)
    return tl.sum(total, axis=0), tl.sum(weighted, axis=0)


@triton.jit
def _finish(
    place, row, ids_ptr, chosen_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, maximum, unusual, total,
    weighted, temperature, HAS_IDS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    count = total.to(tl.float64)
    log_sum = tl.log(count / UNITS).to(tl.float32)
    # NaN and plus infinity have no place in a sum of integers: they make the whole row NaN.
    log_sum = tl.where(unusual > 0, float("nan"), log_sum)
    tl.store(maximum_ptr + row, maximum)
    tl.store(log_sum_ptr + row, log_sum)
    if HAS_ENTROPY:
        mean = (weighted.to(tl.float64) / count).to(tl.float32)
        tl.store(entropy_ptr + row, log_sum - mean)
    if HAS_IDS:
        chosen = _tempered(place + tl.load(ids_ptr + row), temperature)
        tl.store(chosen_ptr + row, chosen - maximum - log_sum)


@triton.jit(do_not_specialize=["columns"])
def _row_kernel(
    logits_ptr, ids_ptr, chosen_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, temperature, columns,
    stride, HAS_IDS: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole row in one program: for as many rows as there are processors, and more."""
    row = tl.program_id(0).to(tl.int64)
    place = logits_ptr + row * stride
    largest, unusual = _largest(place, 0, columns, BLOCK)
    # Division by a positive number keeps the order, so the largest quotient is that of the largest.
    maximum = tl.div_rn(largest, temperature)
    total, weighted = _sums(place, 0, columns, maximum, temperature, HAS_ENTROPY, BLOCK)
    _finish(
        place, row, ids_ptr, chosen_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, maximum, unusual,
        total, weighted, temperature, HAS_IDS, HAS_ENTROPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "width"])
def _span_largest_kernel(
    logits_ptr, largest_ptr, unusual_ptr, columns, width, stride,
    SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum(columns, (span + 1) * width)
    largest, unusual = _largest(logits_ptr + row * stride, span * width, end, BLOCK)
    tl.store(largest_ptr + row * SPANS + span, largest)
    tl.store(unusual_ptr + row * SPANS + span, unusual)


@triton.jit(do_not_specialize=["columns", "width"])
def _span_sums_kernel(
    logits_ptr, largest_ptr, total_ptr, weighted_ptr, temperature, columns, width, stride,
    HAS_ENTROPY: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = tl.max(tl.load(largest_ptr + row * SPANS + tl.arange(0, SPANS)), axis=0)
    end = tl.minimum(columns, (span + 1) * width)
    total, weighted = _sums(
        logits_ptr + row * stride, span * width, end, tl.div_rn(largest, temperature), temperature,
        HAS_ENTROPY, BLOCK,
    )  # fmt: skip
    tl.store(total_ptr + row * SPANS + span, total)
    tl.store(weighted_ptr + row * SPANS + span, weighted)


@triton.jit
def _span_finish_kernel(
    logits_ptr, ids_ptr, chosen_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, largest_ptr,
    unusual_ptr, total_ptr, weighted_ptr, temperature, stride,
    HAS_IDS: tl.constexpr, HAS_ENTROPY: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span = row * SPANS + tl.arange(0, SPANS)
    largest = tl.max(tl.load(largest_ptr + span), axis=0)
    _finish(
        logits_ptr + row * stride, row, ids_ptr, chosen_ptr, maximum_ptr, log_sum_ptr, entropy_ptr,
        tl.div_rn(largest, temperature), tl.max(tl.load(unusual_ptr + span), axis=0),
        tl.sum(tl.load(total_ptr + span), axis=0), tl.sum(tl.load(weighted_ptr + span), axis=0),
        temperature, HAS_IDS, HAS_ENTROPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns"])
def _gradient_kernel(
    logits_ptr, ids_ptr, maximum_ptr, log_sum_ptr, entropy_ptr, of_chosen_ptr, of_entropy_ptr,
    out_ptr, temperature, columns, stride, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    divisor = temperature + tl.zeros([BLOCK], tl.float32)
    logprob = tl.div_rn(x, divisor) - tl.load(maximum_ptr + row) - tl.load(log_sum_ptr + row)
    of_chosen = tl.load(of_chosen_ptr + row)
    factor = tl.zeros([BLOCK], tl.float32) - of_chosen
    if HAS_ENTROPY:
        factor -= (logprob + tl.load(entropy_ptr + row)) * tl.load(of_entropy_ptr + row)
    gradient = factor * tl.exp(logprob)
    gradient += tl.where(column == tl.load(ids_ptr + row), of_chosen, 0.0)
    gradient = tl.div_rn(gradient, divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + column, gradient, mask=inside)


@triton.jit(do_not_specialize=["columns"])
def _temper_kernel(x_ptr, rows_ptr, temperature_ptr, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    temperature = tl.load(temperature_ptr + tl.load(rows_ptr + row)).to(tl.float32)
    divisor = tl.where(temperature > 0, temperature, 1.0) + tl.zeros([BLOCK], tl.float32)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    tl.store(x_ptr + row * stride + column, tl.div_rn(x, divisor), mask=inside)


@torch.no_grad()
def temper_(logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Divide row i in place by `temperatures[rows[i]]`, rounded to nearest; zero divides by one.

    Args:
        logits: float32 `[M, V]`; elements of a row lie next to each other.
        rows: integer `[M]`.
        temperatures: float `[requests]`.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"temper_: logits are {logits.dtype} with stride {logits.stride()}; they must be "
            "float32 with contiguous rows"
        )
    if logits.numel():
        columns = logits.shape[1]
        _temper_kernel[(logits.shape[0], triton.cdiv(columns, _BLOCK))](
            logits,
            rows.contiguous(),
            temperatures.contiguous(),
            columns,
            logits.stride(0),
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one")


def _rows(
    logits: torch.Tensor, ids: torch.Tensor | None, temperature: float, *, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float32 `[M]` chosen log-probs, maxima, logs of sums, entropies."""
    _check_temperature(temperature)
    logits, ids = row_major(logits), None if ids is None else ids.contiguous()
    count, columns = logits.shape
    chosen, maximum, log_sum, of_entropy = torch.empty(
        4, count, dtype=torch.float32, device=logits.device
    ).unbind(0)
    outputs = (chosen, maximum, log_sum, of_entropy)
    flags = {"HAS_IDS": ids is not None, "HAS_ENTROPY": entropy}
    if 0 < count < _MANY_ROWS and columns > _BLOCK:
        _split_rows(logits, ids, outputs, float(temperature), flags)
    elif count:
        _row_kernel[(count,)](
            logits, ids, *outputs, float(temperature), columns, logits.stride(0), BLOCK=_BLOCK,
            num_warps=8, enable_fp_fusion=False, **flags,
        )  # fmt: skip
    return chosen, maximum, log_sum, of_entropy


def _split_rows(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    outputs: tuple[torch.Tensor, ...],
    temperature: float,
    flags: dict[str, bool],
) -> None:
    """Fill `outputs` with several programs a row; their parts are integers, so no order is lost."""
    count, columns = logits.shape
    # Whole blocks, so that a load has one alignment in every span.
    width = triton.cdiv(triton.cdiv(columns, _SPANS), _BLOCK) * _BLOCK
    shape, place = (count, _SPANS), {"device": logits.device}
    largest = torch.empty(shape, dtype=torch.float32, **place)
    unusual = torch.empty(shape, dtype=torch.int32, **place)
    total, weighted = torch.empty(2, *shape, dtype=torch.int64, **place).unbind(0)
    options: dict[str, Any] = {"SPANS": _SPANS, "enable_fp_fusion": False}
    _span_largest_kernel[shape](
        logits, largest, unusual, columns, width, logits.stride(0), BLOCK=_BLOCK, num_warps=8,
        **options,
    )  # fmt: skip
    _span_sums_kernel[shape](
        logits, largest, total, weighted, temperature, columns, width, logits.stride(0),
        HAS_ENTROPY=flags["HAS_ENTROPY"], BLOCK=_BLOCK, num_warps=8, **options,
    )  # fmt: skip
    _span_finish_kernel[(count,)](
        logits, ids, *outputs, largest, unusual, total, weighted, temperature, logits.stride(0),
        num_warps=1, **options, **flags,
    )  # fmt: skip


def _logits_gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    of_chosen: torch.Tensor,
    of_entropy: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of the logits, `[M, V]` in their dtype, from (maximum, log sum, entropy).

    With p the softmax and H its entropy, `d log p[id] / dz = onehot - p` and
    `d H / dz = -p * (log p + H)`, where z is logits / temperature.
    """
    maximum, log_sum, entropy = saved
    logits = row_major(logits)
    count, columns = logits.shape
    out = torch.empty(count, columns, dtype=logits.dtype, device=logits.device)
    if out.numel():
        _gradient_kernel[(count, triton.cdiv(columns, _BLOCK))](
            logits, ids.contiguous(), maximum, log_sum, entropy, of_chosen.contiguous(),
            None if of_entropy is None else of_entropy.contiguous(), out, float(temperature),
            columns, logits.stride(0), HAS_ENTROPY=of_entropy is not None, BLOCK=_BLOCK,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@torch.no_grad()
def log_softmax_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-softmax of each row.

    Args:
        logits: float32 `[M, V]`.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"log_softmax_rows: logits are {logits.dtype}; convert to float32 first")
    _, maximum, log_sum, _ = _rows(logits, None, 1.0, entropy=False)
    return logits - maximum[:, None] - log_sum[:, None]


@torch.no_grad()
def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of several tokens a row, of logits that are already tempered.

    Args:
        logits: float32 or bfloat16 `[M, V]`.
        ids: integer `[M, n]`.

    Returns:
        float32 `[M, n]`; each is the bits of `chosen_logprobs` at temperature 1.
    """
    _, maximum, log_sum, _ = _rows(logits, None, 1.0, entropy=False)
    return logits.gather(1, ids.long()).float() - maximum[:, None] - log_sum[:, None]


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Return the log-prob of one token a row.

    Args:
        logits: `[M, V]`, float32 or bfloat16.
        ids: int64 `[M]`.
        temperature: positive; divides the logits in float32.

    Returns:
        float32 `[M]`. The gradient is computed in float32 and rounded once to the dtype of
        `logits`.
    """
    return _ChosenLogprobs.apply(logits, ids, temperature)  # type: ignore[no-any-return]


def head_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float,
    chunk_rows: int = _CHUNK_ROWS,
    forbidden: Forbidden | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob of one token a row, and entropy of the row, straight from the hidden state.

    Args:
        hidden: `[M, K]`, float32 or bfloat16.
        weight: `[V, K]`, the head; dtype of `hidden`.
        ids: int64 `[M]`.
        temperature: positive; divides the logits in float32.
        chunk_rows: rows of logits held at a time, a multiple of 64; fewer than 2048 are taken as
            2048.
        forbidden: tokens without probability; none of `ids` may be one where it is forbidden. The
            gradient of their logits is exactly 0.

    Returns:
        Log-probs and entropies in nats, float32 `[M]` each.
    """
    if chunk_rows < ROW_BLOCK or chunk_rows % ROW_BLOCK:
        raise ValueError(
            f"head_logprobs: chunk_rows is {chunk_rows}; use a multiple of {ROW_BLOCK}"
        )
    chunk_rows = max(chunk_rows, _CHUNK_ROWS)
    return _HeadLogprobs.apply(  # type: ignore[no-any-return]
        hidden, weight, ids, temperature, chunk_rows, forbidden
    )


def _head_chunk(
    hidden: torch.Tensor, weight: torch.Tensor, rows: slice, forbidden: Forbidden | None
) -> torch.Tensor:
    """Return the logits of these rows in the dtype of `hidden`, not yet tempered."""
    return forbid_(matmul(hidden[rows], weight, transposed=True), forbidden, rows)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        chosen, maximum, log_sum, _ = _rows(logits, ids, temperature, entropy=False)
        ctx.save_for_backward(logits, ids, maximum, log_sum)
        ctx.temperature = temperature
        return chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, ids, maximum, log_sum = ctx.saved_tensors
        saved = (maximum, log_sum, log_sum)
        return _logits_gradient(logits, ids, saved, gradient, None, ctx.temperature), None, None


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
        # One chunk even of no rows, so that there is something to put together.
        chunks = [
            slice(start, start + chunk_rows)
            for start in range(0, max(hidden.shape[0], 1), chunk_rows)
        ]
        figures = [
            _rows(
                _head_chunk(hidden, weight, rows, forbidden), ids[rows], temperature, entropy=True
            )
            for rows in chunks
        ]
        chosen, maximum, log_sum, entropy = (
            torch.cat([chunk[index] for chunk in figures]) for index in range(4)
        )
        ctx.save_for_backward(hidden, weight, ids, maximum, log_sum, entropy)
        ctx.temperature, ctx.chunk_rows, ctx.sums = temperature, chunk_rows, next_op_sums()
        ctx.forbidden = forbidden
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_chosen: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, ids, maximum, log_sum, entropy = ctx.saved_tensors
        upstream = torch.zeros_like(entropy) if of_chosen is None else of_chosen
        of_hidden = torch.empty_like(hidden)
        of_weight = ctx.sums.total(0)
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            of_logits = _logits_gradient(
                _head_chunk(hidden, weight, rows, ctx.forbidden),
                ids[rows],
                (maximum[rows], log_sum[rows], entropy[rows]),
                upstream[rows],
                None if of_entropy is None else of_entropy[rows],
                ctx.temperature,
            )
            of_hidden[rows] = linear_input_gradient((of_logits,), (weight,))
            of_weight = linear_weight_gradient(of_logits, hidden[rows], total=of_weight)
        if of_weight is None:  # no rows
            of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        return of_hidden, ctx.sums.rounded(0, of_weight, weight.dtype), None, None, None, None
