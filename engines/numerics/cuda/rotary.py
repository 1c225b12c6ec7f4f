"""Rotary position embedding on two halves of each head; angle, cosine and sine in one kernel.

Each product and the sum are rounded to the dtype of the input, as `engines.numerics.rotary` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.layout import power_of_two, row_major
from engines.numerics.rotary import check_rotary


@triton.jit(do_not_specialize=["heads"])
def _rotary_kernel(
    x_ptr, positions_ptr, inv_freq_ptr, out_ptr, heads, row_stride, head_stride,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    position = tl.load(positions_ptr + row).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    dtype = x_ptr.dtype.element_ty
    cosine = tl.cos(angle).to(dtype).to(tl.float32)[None, :]
    sine = tl.sin(angle).to(dtype).to(tl.float32)[None, :]
    if BACKWARD:
        sine = -sine
    head = tl.arange(0, BLOCK_HEADS)
    mask = (head < heads)[:, None] & inside[None, :]
    source = x_ptr + row * row_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    # Rounded after each operation, as elementwise ops of that dtype are.
    a = (first * cosine).to(dtype).to(tl.float32) - (second * sine).to(dtype).to(tl.float32)
    b = (second * cosine).to(dtype).to(tl.float32) + (first * sine).to(dtype).to(tl.float32)
    target = out_ptr + (row * heads + head[:, None]) * (2 * HALF) + pair[None, :]
    tl.store(target, a.to(dtype), mask=mask)
    tl.store(target + HALF, b.to(dtype), mask=mask)


def _rotate(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, *, backward: bool
) -> torch.Tensor:
    x = row_major(x)
    rows, heads, width = x.shape
    out = torch.empty(rows, heads, width, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotary_kernel[(rows,)](
            x, positions.contiguous(), inv_freq.contiguous(), out, heads, x.stride(0), x.stride(1),
            HALF=width // 2, BLOCK_HEADS=power_of_two(heads), BLOCK=power_of_two(width // 2),
            BACKWARD=backward, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rotary(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate each pair `(x[i], x[i + head_dim / 2])` by `position * inv_freq[i]`.

    Args:
        x: `[M, heads, head_dim]`, float32 or bfloat16; rows and heads may have any stride.
        positions: integer `[M]`, 0-based within each sequence.
        inv_freq: float32 `[head_dim / 2]` on the device of `x`.
    """
    check_rotary(x, positions, inv_freq)
    if inv_freq.device != x.device:
        raise ValueError(
            f"rotary: inv_freq is on {inv_freq.device} and x on {x.device}; move it once, when "
            "the model is built"
        )
    return _Rotary.apply(x, positions, inv_freq)  # type: ignore[no-any-return]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(positions, inv_freq)
        return _rotate(x, positions, inv_freq, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        positions, inv_freq = ctx.saved_tensors
        return _rotate(gradient, positions, inv_freq, backward=True), None, None
