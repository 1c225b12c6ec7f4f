"""Norm, activation, rotary, embedding: row by row, and gradients in one order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engines.numerics import add, embedding, rms_norm, rotary, rotary_inv_freq, silu_mul

WIDTHS = [576, 100, 37, 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_rows_are_their_own(width, dtype, every_placing_agrees):
    weight = torch.randn(width).to(dtype)
    every_placing_agrees(lambda x: rms_norm(x, weight, 1e-5), torch.randn(256, width).to(dtype))


def test_a_lone_row_too_long_for_one_thread_is_summed_alike(same_bits):
    x, weight = torch.randn(20, 300_000), torch.ones(300_000)
    everything = rms_norm(x, weight, 1e-5)
    torch.set_num_threads(2)
    assert same_bits(rms_norm(x[3:4], weight, 1e-5), everything[3:4])


@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_elements_are_their_own(width, dtype, every_placing_agrees):
    every_placing_agrees(
        lambda x: silu_mul(x, x.flip(-1)), torch.randn(256, width).mul(8).to(dtype)
    )
    every_placing_agrees(lambda x: add(x, x.flip(-1)), torch.randn(256, width).to(dtype))


def test_stock_silu_depends_on_where_an_element_stands(same_bits):
    x = torch.randn(4096) * 8
    everything = F.silu(x)
    assert not all(same_bits(F.silu(x[:n]), everything[:n]) for n in range(1, 64))


def test_silu_mul_is_silu_rounded_then_times_up(dtype, same_bits):
    gate, up = torch.randn(64, 100).mul(4).to(dtype), torch.randn(64, 100).to(dtype)
    wide = gate.float()
    assert same_bits(silu_mul(gate, up), (wide / (1 + torch.exp(-wide))).to(dtype) * up)


def test_silu_mul_of_extreme_gates_stays_finite(dtype):
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]]).to(dtype).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    out = silu_mul(gate, up)
    out.sum().backward()
    assert out.isfinite().all()
    assert gate.grad.isfinite().all()
    assert gate.grad[0, -1] == 1.0


def test_more_elements_than_a_chunk_change_nothing(dtype, same_bits):
    gate, up = torch.randn(700, 128).to(dtype), torch.randn(700, 128).to(dtype)
    assert same_bits(silu_mul(gate, up)[650:], silu_mul(gate[650:], up[650:]))


@pytest.mark.parametrize("head_dim", [64, 24, 6])
def test_rotary_rows_are_their_own(head_dim, dtype, same_bits):
    x, positions = torch.randn(200, 3, head_dim).to(dtype), torch.randint(0, 4000, (200,))
    inv_freq = rotary_inv_freq(10000.0, head_dim)
    everything = rotary(x, positions, inv_freq)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 15, 16, 17, 33, 200):
            for first in (0, 200 - count):
                here = slice(first, first + count)
                assert same_bits(rotary(x[here], positions[here], inv_freq), everything[here])
        fused = torch.cat((x, x), 1)
        assert same_bits(rotary(fused[:, :3], positions, inv_freq), everything)


def test_rotary_backward_turns_back(dtype, relative_error, tolerance):
    x = torch.randn(40, 3, 64).to(dtype).requires_grad_()
    positions, inv_freq = torch.arange(40), rotary_inv_freq(10000.0, 64)
    out = rotary(x, positions, inv_freq)
    out.backward(out.detach())
    assert relative_error(x.grad, x.detach().double()) < tolerance


def test_rotary_matches_float64(dtype, relative_error, tolerance):
    x = torch.randn(40, 3, 64).to(dtype)
    positions, inv_freq = torch.arange(40), rotary_inv_freq(10000.0, 64)
    angle = (positions[:, None].float() * inv_freq).double().repeat(1, 2)[:, None]
    first, second = x.double().chunk(2, -1)
    exact = x.double() * angle.cos() + torch.cat((-second, first), -1) * angle.sin()
    assert relative_error(rotary(x, positions, inv_freq), exact) < tolerance


def test_rotary_refuses_rounded_frequencies():
    with pytest.raises(ValueError, match="bfloat16"):
        rotary(torch.randn(2, 1, 4), torch.arange(2), rotary_inv_freq(1e4, 4).bfloat16())
    with pytest.raises(ValueError, match="head_dim 5"):
        rotary_inv_freq(1e4, 5)


def op_and_leaves(name, dtype, rows):
    if name == "rms_norm":
        leaves = [torch.randn(rows, 100).to(dtype), torch.randn(100).to(dtype)]
        return (lambda x, w: rms_norm(x, w, 1e-5)), _plain_rms_norm, leaves
    leaves = [torch.randn(rows, 100).to(dtype), torch.randn(rows, 100).to(dtype)]
    return silu_mul, (lambda gate, up: F.silu(gate) * up), leaves


def _plain_rms_norm(x, weight):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul"])
def test_values_and_gradients_match_float64(name, dtype, relative_error, tolerance):
    op, plain, leaves = op_and_leaves(name, dtype, 150)
    upstream = torch.randn(150, 100).to(dtype)
    mine = [t.clone().requires_grad_() for t in leaves]
    exact = [t.double().requires_grad_() for t in leaves]
    out, reference = op(*mine), plain(*exact)
    assert relative_error(out, reference) < tolerance
    out.backward(upstream)
    reference.backward(upstream.double())
    for a, b in zip(mine, exact, strict=True):
        assert relative_error(a.grad, b.grad) < tolerance


def rms_norm_gradients(x, weight, upstream):
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    rms_norm(*leaves, 1e-5).backward(upstream)
    return [t.grad for t in leaves]


def test_zero_rows_change_no_gradient_of_rms_norm(dtype, same_bits):
    x, upstream = torch.randn(128, 100).to(dtype), torch.randn(128, 100).to(dtype)
    weight = torch.randn(100).to(dtype)
    alone = rms_norm_gradients(x, weight, upstream)
    zeros = torch.zeros(64, 100, dtype=dtype)
    spread = [torch.cat((t[:64], zeros, t[64:], zeros[:5])) for t in (x, upstream)]
    torch.set_num_threads(2)
    padded = rms_norm_gradients(spread[0], weight, spread[1])
    assert same_bits(padded[1], alone[1])
    assert same_bits(torch.cat((padded[0][:64], padded[0][128:192])), alone[0])
    moved = [torch.cat((t[9:], t[:9])).float() for t in (x, upstream)]
    in_float32 = [rms_norm_gradients(x.float(), weight.float(), upstream.float())[1]]
    in_float32.append(rms_norm_gradients(moved[0], weight.float(), moved[1])[1])
    assert not same_bits(*in_float32)


def embedding_gradient(ids, weight, upstream):
    leaf = weight.clone().requires_grad_()
    embedding(ids, leaf).backward(upstream)
    return leaf.grad


def test_embedding_looks_up(dtype, same_bits):
    weight, ids = torch.randn(50, 12).to(dtype), torch.randint(0, 50, (70,))
    assert same_bits(embedding(ids, weight), weight[ids])


def test_embedding_gradient_is_the_block_sum_in_ascending_rows(dtype, same_bits):
    ids, upstream = torch.randint(0, 9, (200,)), torch.randn(200, 12).to(dtype)
    total = torch.zeros(9, 12)
    for start in range(0, 200, 64):
        partial = torch.zeros(9, 12)
        for row in range(start, min(start + 64, 200)):
            partial[ids[row]] += upstream[row].float()
        total += partial
    weight = torch.randn(9, 12).to(dtype)
    assert same_bits(embedding_gradient(ids, weight, upstream), total.to(dtype))
    torch.set_num_threads(2)
    assert same_bits(embedding_gradient(ids, weight, upstream), total.to(dtype))
    if dtype == torch.float32:
        backwards = embedding_gradient(ids.flip(0), weight, upstream.flip(0))
        assert not same_bits(backwards, total)


def test_padding_changes_no_embedding_gradient(dtype, same_bits):
    ids, upstream = torch.randint(0, 9, (128,)), torch.randn(128, 12).to(dtype)
    weight = torch.randn(9, 12).to(dtype)
    alone = embedding_gradient(ids, weight, upstream)
    spread = torch.cat((ids[:64], torch.zeros(64, dtype=torch.int64), ids[64:]))
    zeros = torch.zeros(64, 12, dtype=dtype)
    padded = embedding_gradient(spread, weight, torch.cat((upstream[:64], zeros, upstream[64:])))
    assert same_bits(padded, alone)
