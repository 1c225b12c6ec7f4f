"""AdamW as plain elementwise arithmetic, so that a shard steps like the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_CHUNK = 1 << 16
"""Elements stepped at a time, so that temporaries stay in cache; it decides no bit."""


def check_adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
) -> None:
    """Require what `adamw_step_` takes.

    Raises:
        ValueError: A tensor is not float32 or not of the shape of `param`, what is changed in place
            is not contiguous, or the step is not positive.
    """
    if step < 1:
        raise ValueError(f"adamw_step_: step is {step}; the first step is 1")
    changed = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in {**changed, "grad": grad}.items():
        if tensor.dtype != torch.float32 or tensor.shape != param.shape:
            raise ValueError(
                f"adamw_step_: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be float32 "
                f"{tuple(param.shape)}, as the parameter"
            )
        if name in changed and not tensor.is_contiguous():
            raise ValueError(
                f"adamw_step_: {name} is stepped in place and must be contiguous float32, its "
                f"strides are {tensor.stride()}"
            )


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
    """Take one AdamW step in place (Loshchilov and Hutter, 2019, algorithm 2).

    With g the gradient: `p *= 1 - lr * weight_decay`; `m = beta1 * m + (1 - beta1) * g`; `v = beta2
    * v + (1 - beta2) * g * g`; `p -= lr / c1 * (m / (sqrt(v) / sqrt(c2) + eps))`, where `c_i = 1 -
    beta_i ** step`. Scalars are float64 and rounded to float32 where they meet a tensor. Each
    multiplication, addition, division and root rounds by itself: torch's fused forms (`addcmul_`,
    `add_(alpha=)`, `lerp_`) may or may not contract, depending on where an element stands.

    Args:
        param: float32, contiguous; changed in place, as are the two moments.
        grad: float32, shape of `param`.
        exp_avg: first moment m.
        exp_avg_sq: second moment v.
        step: number of this step, from 1.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; multiplied by `lr`.
    """
    check_adamw(param, grad, exp_avg, exp_avg_sq, step=step)
    step_size = lr / (1.0 - beta1**step)
    root_correction = math.sqrt(1.0 - beta2**step)
    flat = [t.view(-1).split(_CHUNK) for t in (param, exp_avg, exp_avg_sq)]
    for p, m, v, g in zip(*flat, grad.reshape(-1).split(_CHUNK), strict=True):
        p.mul_(1.0 - lr * weight_decay)
        m.mul_(beta1).add_(g * (1.0 - beta1))
        v.mul_(beta2).add_((g * g).mul_(1.0 - beta2))
        denominator = v.sqrt().div_(root_correction).add_(eps)
        p.sub_((m / denominator).mul_(step_size))


def adamw_steps_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Take one AdamW step of many tensors in place; each is that of `adamw_step_`.

    Args:
        params: float32, contiguous.
        grads: float32, shapes of `params`.
        exp_avgs: first moments.
        exp_avg_sqs: second moments.
        step: number of this step, from 1.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; multiplied by `lr`.
    """
    for state in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        adamw_step_(
            *state, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay
        )
