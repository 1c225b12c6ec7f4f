"""Rotary position embedding on two halves of each head (the NeoX layout of Llama and Qwen)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rotary_inv_freq(theta: float, head_dim: int) -> torch.Tensor:
    """Return `theta ** (-2 i / head_dim)`, float32 `[head_dim / 2]`.

    Args:
        theta: base of the wavelengths, `rope_theta` of the model.
        head_dim: elements of a head; all of them are rotated.
    """
    if head_dim % 2:
        raise ValueError(f"rotary_inv_freq: head_dim {head_dim} has no two halves; use an even one")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponent)


def check_rotary(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> None:
    """Require float32 frequencies, one for each pair of a head, and a position for every row.

    Raises:
        ValueError: They are not.
    """
    if inv_freq.dtype != torch.float32:
        raise ValueError(
            f"rotary: inv_freq is {inv_freq.dtype}; a cast model has rounded it, use float32"
        )
    if x.shape[-1] != 2 * len(inv_freq) or len(x) > len(positions):
        raise ValueError(
            f"rotary: x is {tuple(x.shape)}, with {len(positions)} positions and {len(inv_freq)} "
            "frequencies; every row needs a position and every pair of a head a frequency"
        )


def rotary(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate each pair `(x[i], x[i + head_dim / 2])` by `position * inv_freq[i]`.

    Angle, cosine and sine are float32, rounded to the dtype of `x`; products and sum are rounded in
    that dtype, as in transformers. The gradient is rotated back.

    Args:
        x: `[M, heads, head_dim]`.
        positions: int64 `[M]`, 0-based within each sequence.
        inv_freq: float32 `[head_dim / 2]`, of `rotary_inv_freq`.

    Returns:
        `[M, heads, head_dim]`, dtype of `x`.
    """
    check_rotary(x, positions, inv_freq)
    angle = (positions.float()[:, None] * inv_freq)[:, None]
    return _Rotary.apply(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))  # type: ignore[no-any-return]


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradient, cosine, -sine), None, None
