"""Elementwise ops: every operation in float32, rounded where the definition rounds.

An element's value cannot depend on where it stands: each is computed by the same instructions,
without contraction into fused multiply-adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from engines.numerics.cuda.layout import row_major

_BLOCK = 1024


@triton.jit
def _denominator(x):
    return 1.0 + tl.exp(-x)


@triton.jit(do_not_specialize=["columns"])
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, columns, gate_stride, up_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = tl.div_rn(wide, _denominator(wide)).to(gate.dtype)
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * columns + column, product, mask=inside)


@triton.jit(do_not_specialize=["columns"])
def _silu_mul_backward_kernel(
    gate_ptr, up_ptr, gradient_ptr, of_gate_ptr, of_up_ptr, columns, gate_stride, up_stride,
    gradient_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + row * gradient_stride + column, mask=inside, other=0.0)
    upstream = gradient.to(tl.float32)
    wide = gate.to(tl.float32)
    denominator = _denominator(wide)
    activated = tl.div_rn(wide, denominator).to(gate.dtype).to(tl.float32)
    # silu'(x) = sigmoid(x) * (1 + x * (1 - sigmoid(x)))
    sigmoid = tl.div_rn(1.0, denominator)
    slope = ((1.0 - sigmoid) * wide + 1.0) * sigmoid
    of_gate = slope * upstream * up
    tl.store(of_gate_ptr + row * columns + column, of_gate.to(gate.dtype), mask=inside)
    of_up = upstream * activated
    tl.store(of_up_ptr + row * columns + column, of_up.to(gate.dtype), mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x + y`, rounded once: the residual connection."""
    return x + y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `round(x / (1 + exp(-x))) * up`; see `engines.numerics.silu_mul`.

    Args:
        gate: `[M, K]`, float32 or bfloat16; rows may be part of wider ones.
        up: `[M, K]`, dtype of `gate`.
    """
    return _SiluMul.apply(gate, up)  # type: ignore[no-any-return]


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        gate, up = row_major(gate), row_major(up)
        rows, columns = gate.shape
        out = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
        if out.numel():
            _silu_mul_kernel[(rows, triton.cdiv(columns, _BLOCK))](
                gate, up, out, columns, gate.stride(0), up.stride(0),
                BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return silu_mul_gradient(gate, up, gradient)


def silu_mul_gradient(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `gate` and `up` from that of their `silu_mul`, all `[M, K]`."""
    gate, up, gradient = row_major(gate), row_major(up), row_major(gradient)
    rows, columns = gate.shape
    of_gate = torch.empty(rows, columns, dtype=gate.dtype, device=gate.device)
    of_up = torch.empty_like(of_gate)
    if of_gate.numel():
        _silu_mul_backward_kernel[(rows, triton.cdiv(columns, _BLOCK))](
            gate, up, gradient, of_gate, of_up, columns,
            gate.stride(0), up.stride(0), gradient.stride(0),
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return of_gate, of_up
