"""Matrix products whose every output row depends on that row and the weights alone.

Forward: one GEMM on a row count padded to a multiple of 16. Padded so, a row's bits do not depend
on the number of rows, its position, the threads, or on which other output columns the weight has (a
fused q, k, v equals three separate matrices). Unpadded, one row takes another kernel and differs;
so it does on AMX, which the package keeps oneDNN off (`engines.environment.MAX_CPU_ISA`).

Backward: the input gradient is the same padded GEMM; over several matrices on one input it has one
definition, `linear_input_gradient`, for callers that keep the matrices fused. The weight gradient
is a float32 sum over blocks of 64 rows, left to right, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK, ROW_TILE, block_sum, pad_rows
from engines.numerics.products import padded_linear, padded_matmul
from engines.numerics.slot_sums import next_op_sums


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`, dtype of `x`.
        bias: `[N]`, dtype of `x`, or None.

    Returns:
        `[M, N]`, dtype of `x`.
    """
    return linear_multi(x, (weight,), (bias,))[0]


def linear_multi(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Apply several matrices to one input; each output is that of `linear`.

    Args:
        x: `[M, K]`.
        weights: each `[N_i, K]`, dtype of `x`.
        biases: each `[N_i]` or None; as many as `weights`.

    Returns:
        `[M, N_i]` for each weight. The gradient of `x` is `linear_input_gradient` of all of them.
    """
    if len(weights) != len(biases):
        raise ValueError(f"linear_multi: {len(weights)} weights but {len(biases)} biases")
    return _Linear.apply(x, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def linear_input_gradient(
    gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of an input that several matrices share.

    Each matrix's product is made in the compute dtype, taken to float32 and added left to right;
    the sum is rounded once. A trainer that keeps the matrices fused splits weight and gradient and
    calls this, and so gets the bits of one that keeps them apart.

    Args:
        gradients: each `[M, N_i]`, gradients of the outputs.
        weights: each `[N_i, K]`, same dtype.

    Returns:
        `[M, K]`, dtype of the gradients.
    """
    total: torch.Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        product = padded_matmul(gradient, weight)
        total = product.float() if total is None else total.add_(product)
    if total is None:
        raise ValueError("linear_input_gradient: no matrices were given")
    return total[: gradients[0].shape[0]].to(gradients[0].dtype)


def linear_weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, *, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight gradient before its rounding: block products added left to right.

    Args:
        gradient: `[M, N]`, gradient of the output.
        x: `[M, K]`, the input.
        total: float32 `[N, K]` to go on from, changed in place; None starts from zero. Going on
            after a multiple of 64 rows gives the bits of one call over all rows.

    Returns:
        float32 `[N, K]`; zero rows, and whole blocks of them, change no bit.
    """
    if total is None:
        total = x.new_zeros(gradient.shape[1], x.shape[1], dtype=torch.float32)
    pairs = zip(
        pad_rows(gradient, ROW_BLOCK).split(ROW_BLOCK),
        pad_rows(x, ROW_BLOCK).split(ROW_BLOCK),
        strict=True,
    )
    for block_gradient, block_x in pairs:
        total.addmm_(block_gradient.float().t(), block_x.float())
    return total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, count: int, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.sums = next_op_sums()
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        padded = pad_rows(x, ROW_TILE)
        return tuple(
            padded_linear(padded, weight, bias)[: x.shape[0]]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        count = len(weights)
        of_x = linear_input_gradient(gradients, weights) if ctx.needs_input_grad[0] else None
        of_parameters: list[torch.Tensor | None] = [None] * (2 * count)
        for index, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            if needed[index]:
                total = linear_weight_gradient(gradient, x, total=ctx.sums.total(index))
                of_parameters[index] = ctx.sums.rounded(index, total, weight.dtype)
        for index, (gradient, dtype) in enumerate(
            zip(gradients, ctx.bias_dtypes, strict=True), start=count
        ):
            if needed[index]:
                total = block_sum(gradient.float(), total=ctx.sums.total(index))
                of_parameters[index] = ctx.sums.rounded(index, total, dtype)
        return of_x, None, *of_parameters
