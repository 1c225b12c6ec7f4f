"""Matrix products whose every output row depends on that row and the weights alone.

All products run on our own kernels (`engines.numerics.cuda.matmul`): one tile shape whatever the
number of rows, and no split of the sum. cuBLAS with a workspace of `:16:8` was measured on an H200
and is not used: its input gradients, and `down_proj` of a 0.5B shape, changed with the row count.
Weight gradients take rows in blocks of 64, left to right, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.matmul import add_weight_gradient, matmul, summed_input_gradient
from engines.numerics.cuda.rows import block_sum
from engines.numerics.slot_sums import next_op_sums


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`; see `engines.numerics.linear`.

    Args:
        x: `[M, K]`, float32 or bfloat16.
        weight: `[N, K]`, dtype of `x`.
        bias: `[N]`, dtype of `x`, or None.
    """
    return linear_multi(x, (weight,), (bias,))[0]


def linear_multi(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Apply several matrices to one input; each output is that of `linear`."""
    if len(weights) != len(biases):
        raise ValueError(f"linear_multi: {len(weights)} weights but {len(biases)} biases")
    return _Linear.apply(x, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def linear_input_gradient(
    gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of an input that several matrices share.

    Each matrix's product is made in the compute dtype, taken to float32 and added left to right;
    the sum is rounded once.

    Args:
        gradients: each `[M, N_i]`, gradients of the outputs.
        weights: each `[N_i, K]`, same dtype.

    Returns:
        `[M, K]`, dtype of the gradients.
    """
    if not gradients:
        raise ValueError("linear_input_gradient: no matrices were given")
    if len(gradients) == 1:
        return matmul(gradients[0].contiguous(), weights[0], None, transposed=False)
    if len(gradients) <= 3:
        return summed_input_gradient(gradients, weights)
    total: torch.Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        part = matmul(gradient.contiguous(), weight, None, transposed=False)
        total = part.float() if total is None else total.add_(part)
    assert total is not None
    return total.to(gradients[0].dtype)


def linear_weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, *, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the float32 weight gradient before its rounding: block products, left to right.

    Args:
        gradient: `[M, N]`, gradient of the output.
        x: `[M, K]`, the input.
        total: float32 `[N, K]` to go on from, changed in place; None starts from zero. Going on
            after a multiple of 64 rows gives the bits of one call over all rows.
    """
    return _weight_gradient(gradient, x, total, torch.float32)


def _weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, total: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight gradient, summed on from `total` and rounded to `dtype`.

    A float32 sum that goes on is `total` itself, changed in place.
    """
    if total is not None and dtype == total.dtype:
        out = total
    else:
        out = torch.empty(gradient.shape[1], x.shape[1], dtype=dtype, device=x.device)
    add_weight_gradient(out if total is None else total, gradient, x, out=out, fresh=total is None)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, count: int, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.sums = next_op_sums()
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        return tuple(
            matmul(x, weight, bias, transposed=True)
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
                dtype = ctx.sums.dtype_of_sum(weight.dtype)
                total = _weight_gradient(gradient, x, ctx.sums.total(index), dtype)
                of_parameters[index] = ctx.sums.rounded(index, total, weight.dtype)
        for index, (gradient, dtype) in enumerate(
            zip(gradients, ctx.bias_dtypes, strict=True), start=count
        ):
            if needed[index]:
                wide = ctx.sums.dtype_of_sum(dtype)
                total = block_sum(gradient, total=ctx.sums.total(index), dtype=wide)
                of_parameters[index] = ctx.sums.rounded(index, total, dtype)
        return of_x, None, *of_parameters
