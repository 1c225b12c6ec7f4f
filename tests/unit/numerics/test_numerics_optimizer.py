"""AdamW: the textbook step, and a shard steps like the whole."""

from __future__ import annotations

import pytest
import torch

from engines.numerics import adamw_step_

OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def random_state(size):
    return torch.randn(size), torch.randn(size), torch.randn(size) * 0.1, torch.rand(size) * 0.1


def test_a_shard_steps_like_the_whole_tensor(same_bits):
    whole = random_state(200_003)
    before = [t.clone() for t in whole]
    adamw_step_(*whole, step=3, **OPTIONS)
    assert not same_bits(whole[0], before[0])
    assert same_bits(whole[1], before[1])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for first, last in ((0, 1), (1, 18), (7, 100), (65_000, 66_001), (13, 200_003)):
            shard = [t[first:last].clone() for t in before]
            adamw_step_(*shard, step=3, **OPTIONS)
            for part, full in zip(shard, whole, strict=True):
                assert same_bits(part, full[first:last]), f"{first}:{last}"


def test_many_steps_match_float64_adamw():
    param = torch.randn(50, 7)
    stock = param.double().requires_grad_()
    optimizer = torch.optim.AdamW(
        [stock], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    moments = torch.zeros_like(param), torch.zeros_like(param)
    for step in range(1, 11):
        grad = torch.randn(50, 7)
        stock.grad = grad.double()
        optimizer.step()
        adamw_step_(param, grad, *moments, step=step, **OPTIONS)
    # Ten steps, each with a handful of float32 roundings (2^-24) on values near one.
    assert (param.double() - stock.detach()).abs().max() < 2e-6
    state = optimizer.state[stock]
    assert (moments[0].double() - state["exp_avg"]).abs().max() < 1e-6
    assert (moments[1].double() - state["exp_avg_sq"]).abs().max() < 1e-6


def test_one_flipped_bit_of_a_gradient_changes_the_step(same_bits):
    clean = random_state(100)
    flipped = [t.clone() for t in clean]
    flipped[1].view(torch.int32)[41] ^= 1 << 20
    adamw_step_(*clean, step=1, **OPTIONS)
    adamw_step_(*flipped, step=1, **OPTIONS)
    assert not same_bits(clean[0], flipped[0])
    assert same_bits(clean[0][:41], flipped[0][:41])


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step is 0"):
        adamw_step_(*random_state(4), step=0, **OPTIONS)
