"""AdamW as plain elementwise arithmetic, so that a shard steps like the whole tensor.

Each operation rounds by itself: contraction into fused multiply-adds is switched off, and division
and root are the correctly rounded ones. All tensors of a model step in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.numerics.cuda.groups import owner_of
from engines.numerics.cuda.tables import all_aligned, table_of
from engines.numerics.optimizer import check_adamw

_BLOCK = 1024
_ROUNDS = 8
_FIELDS = tl.constexpr(5)


@triton.jit
def _float32(address, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["tensors"])
def _adamw_kernel(
    table_ptr, first_ptr, tensors, keep, beta1, rest1, beta2, rest2, correction, eps, step_size,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = owner_of(program, first_ptr, tensors)
    row = table_ptr + tensor.to(tl.int64) * _FIELDS
    param_ptr, gradient_ptr = _float32(tl.load(row), ALIGNED), _float32(tl.load(row + 1), ALIGNED)
    mean_ptr, square_ptr = _float32(tl.load(row + 2), ALIGNED), _float32(tl.load(row + 3), ALIGNED)
    count = tl.load(row + 4)
    base = (program - tl.load(first_ptr + tensor)).to(tl.int64) * (BLOCK * ROUNDS)
    whole = tl.zeros([BLOCK], tl.float32)
    for turn in range(0, ROUNDS):
        place = base + turn * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0)
        param = tl.load(param_ptr + place, mask=inside, other=0.0) * keep
        mean = tl.load(mean_ptr + place, mask=inside, other=0.0) * beta1 + gradient * rest1
        square = tl.load(square_ptr + place, mask=inside, other=0.0) * beta2
        square += (gradient * gradient) * rest2
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
    adamw_steps_(
        [param], [grad], [exp_avg], [exp_avg_sq], step=step, lr=lr, beta1=beta1, beta2=beta2,
        eps=eps, weight_decay=weight_decay,
    )  # fmt: skip


@torch.no_grad()
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
    """Take one AdamW step of many tensors in place, in one launch; each is that of `adamw_step_`.

    Args:
        params: float32, contiguous, all on one device; as are the moments.
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
        check_adamw(*state, step=step)
    states = [
        (param, grad.contiguous(), mean, square)
        for param, grad, mean, square in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
        if param.numel()
    ]
    if not states:
        return
    rows = [[*(tensor.data_ptr() for tensor in state), state[0].numel()] for state in states]
    programs = [triton.cdiv(state[0].numel(), _BLOCK * _ROUNDS) for state in states]
    table = table_of(rows, programs, states[0][0].device)
    _adamw_kernel[(table.programs,)](
        table.rows, table.first, len(states), 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2,
        1.0 - beta2, math.sqrt(1.0 - beta2**step), eps, lr / (1.0 - beta1**step),
        ALIGNED=all_aligned([tensor for state in states for tensor in state]),
        BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
