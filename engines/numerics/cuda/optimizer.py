"""AdamW as plain elementwise arithmetic in one kernel, so that a shard steps like the whole tensor.

Each operation rounds by itself: contraction into fused multiply-adds is switched off, and division
and root are the correctly rounded ones.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _adamw_kernel(
    param_ptr, gradient_ptr, mean_ptr, square_ptr, count, keep, beta1, rest1, beta2, rest2,
    correction, eps, step_size, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0)
    param = tl.load(param_ptr + place, mask=inside, other=0.0) * keep
    mean = tl.load(mean_ptr + place, mask=inside, other=0.0) * beta1 + gradient * rest1
    square = (
        tl.load(square_ptr + place, mask=inside, other=0.0) * beta2 + (gradient * gradient) * rest2
    )
    whole = tl.zeros([BLOCK], tl.float32)
    denominator = tl.div_rn(tl.sqrt_rn(square), correction + whole) + eps
    param -= tl.div_rn(mean, denominator) * step_size
    tl.store(param_ptr + place, param, mask=inside)
    tl.store(mean_ptr + place, mean, mask=inside)
    tl.store(square_ptr + place, square, mask=inside)


@torch.no_grad()
def adamw_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Take one AdamW step in place, as `engines.numerics.adamw_step_` describes."""
    if step < 1:
        raise ValueError(f"adamw_step_: step is {step}; the first step is 1")
    for name, tensor in (("param", param), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not tensor.is_contiguous():
            raise ValueError(f"adamw_step_: {name} is not contiguous, stride {tensor.stride()}")
    if not param.numel():
        return
    _adamw_kernel[(triton.cdiv(param.numel(), _BLOCK),)](
        param, grad.contiguous(), exp_avg, exp_avg_sq, param.numel(),
        1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2,
        math.sqrt(1.0 - beta2**step), eps, lr / (1.0 - beta1**step),
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
