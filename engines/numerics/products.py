"""The matrix products of all ops on CPU: padded rows, in the dtype that this CPU can multiply.

Rows are padded to a multiple of 16 (`engines.numerics.blocks`). bfloat16 is multiplied by oneDNN
where that has kernels for it, from AVX-512 on. Elsewhere torch falls back to a plain loop at 1 to 3
GFLOP/s, so there the same values are multiplied in float32, which holds every product of two
bfloat16 values exactly, and rounded once. Trainer and rollout engine call this alike, so what they
compare is equal on either CPU; the bits differ between the two, as they do between any two kinds.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from engines.numerics.blocks import ROW_TILE, pad_rows


@cache
def has_bfloat16_kernels() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU, by torch's own test of it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of this dtype are multiplied."""
    in_float32 = dtype == torch.bfloat16 and not has_bfloat16_kernels()
    return torch.float32 if in_float32 else dtype


def padded_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x @ weight.T + bias` on padded rows.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`, dtype of `x`.
        bias: `[N]`, dtype of `x`, or None.

    Returns:
        `[M padded to 16, N]`, dtype of `x`.
    """
    dtype = product_dtype(x.dtype)
    padded = pad_rows(x, ROW_TILE).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.linear(padded, weight.to(dtype).contiguous(), bias).to(x.dtype)


def padded_matmul(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return `x @ matrix` on padded rows.

    Args:
        x: `[M, N]`.
        matrix: `[N, K]`, dtype of `x`.

    Returns:
        `[M padded to 16, K]`, dtype of `x`.
    """
    dtype = product_dtype(x.dtype)
    return (pad_rows(x, ROW_TILE).to(dtype) @ matrix.to(dtype).contiguous()).to(x.dtype)
