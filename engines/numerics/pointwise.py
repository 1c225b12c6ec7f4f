"""Elementwise ops: what an element becomes must not depend on where it stands.

Additions, products and quotients round alike everywhere, and torch's `exp` was probed to. `F.silu`
and `torch.sigmoid` do not: the last elements of an array, which do not fill a vector register, take
a scalar path with other bits. Hence silu is spelled `x / (1 + exp(-x))`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 16
"""Elements worked on at a time, so that temporaries stay in cache; it decides no bit."""


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return `x + y`, rounded once: the residual connection.

    Args:
        x: any shape.
        y: shape and dtype of `x`.
    """
    return x + y


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `round(silu(gate)) * up`, the gated activation of the MLP.

    `silu(x) = x / (1 + exp(-x))` is computed in float32 and rounded to the dtype of `gate`; the
    product is rounded once more, as in transformers.

    Args:
        gate: `[M, K]`.
        up: `[M, K]`, dtype of `gate`.

    Returns:
        `[M, K]`, dtype of `gate`.
    """
    return _SiluMul.apply(gate, up)  # type: ignore[no-any-return]


def _flat(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut tensors of one shape into chunks of their elements; contiguous ones are not copied."""
    return list(zip(*(t.reshape(-1).split(_CHUNK) for t in tensors), strict=True))


def _denominator(x: torch.Tensor) -> torch.Tensor:
    """Return `1 + exp(-x)` of float32 `x`."""
    return x.neg().exp_().add_(1.0)


def silu_mul_gradient(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `gate` and `up` of `silu_mul`.

    Args:
        gate: `[M, K]`.
        up: `[M, K]`, dtype of `gate`.
        gradient: `[M, K]`, gradient of the result.
    """
    of_gate, of_up = (
        torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, up)
    )
    for gate_part, up_part, upstream, gate_out, up_out in _flat(gate, up, gradient, of_gate, of_up):
        wide = gate_part.float()
        denominator = _denominator(wide)
        torch.mul(upstream, (wide / denominator).to(gate.dtype), out=up_out)
        # silu'(x) = sigmoid(x) * (1 + x * (1 - sigmoid(x)))
        sigmoid = denominator.reciprocal_()
        slope = (1.0 - sigmoid).mul_(wide).add_(1.0).mul_(sigmoid)
        gate_out.copy_(slope.mul_(upstream.float()).mul_(up_part))
    return of_gate, of_up


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for gate_part, up_part, out_part in _flat(gate, up, out):
            wide = gate_part.float()
            torch.mul((wide / _denominator(wide)).to(gate.dtype), up_part, out=out_part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return silu_mul_gradient(gate, up, gradient)
