"""Matrix products: a row's bits are its own, and weight gradients do not see packing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from engines.environment import cpu_facts
from engines.numerics import (
    linear,
    linear_input_gradient,
    linear_multi,
    linear_weight_gradient,
)

SHAPES = [(576, 192), (100, 37), (64, 1536), (24, 40)]


def gradients(x, weight, bias, upstream):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    linear(*leaves).backward(upstream)
    return [t.grad for t in leaves]


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_are_independent_of_count_place_stride_and_threads(k, n, dtype, every_placing_agrees):
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    every_placing_agrees(lambda x: linear(x, weight, bias), torch.randn(512, k).to(dtype))
    every_placing_agrees(lambda x: linear(x, weight), torch.randn(256, k).to(dtype))


def test_every_row_count_up_to_200_agrees_with_a_big_batch(dtype, same_bits):
    x, weight = torch.randn(512, 576).to(dtype), torch.randn(96, 576).to(dtype)
    everything = linear(x, weight)
    for count in range(1, 201):
        assert same_bits(linear(x[:count], weight), everything[:count]), f"{count} rows"


def test_an_unpadded_product_depends_on_the_row_count(same_bits):
    x, weight = torch.randn(512, 576), torch.randn(192, 576)
    everything = F.linear(x, weight)
    assert not all(same_bits(F.linear(x[:n], weight), everything[:n]) for n in range(1, 200))


ROW_LAW = """
import torch
from engines.numerics import linear
torch.set_num_threads(1)  # with many threads each has few rows, which may hide what AMX does
torch.manual_seed(0)
x, weight = torch.randn(512, 1536).bfloat16(), torch.randn(576, 1536).bfloat16()
everything = linear(x, weight)
print(all(torch.equal(linear(x[:n], weight), everything[:n]) for n in range(1, 257)))
"""


@pytest.mark.parametrize("isa", [None, "ALL"])
def test_rows_are_independent_where_onednn_may_not_use_amx(isa):
    """The cap of `engines.environment` is needed on a CPU with AMX, and there alone."""
    environment = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    ended = subprocess.run(
        [sys.executable, "-c", ROW_LAW],
        env=environment | ({"ONEDNN_MAX_CPU_ISA": isa} if isa else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    has_amx = "amx_bf16" in cpu_facts()["flags"]
    assert ended.stdout.strip() == str(isa is None or not has_amx)


@pytest.mark.parametrize("rows", [1, 16, 50, 250])
def test_fused_columns_equal_separate_matrices(rows, dtype, same_bits):
    x = torch.randn(rows, 576).to(dtype)
    weights = [torch.randn(n, 576).to(dtype) for n in (576, 192, 192, 37)]
    biases = [torch.randn(len(w)).to(dtype) for w in weights]
    fused = linear(x, torch.cat(weights), torch.cat(biases)).split([len(w) for w in weights], 1)
    for one, weight, bias, part in zip(
        linear_multi(x, weights, biases), weights, biases, fused, strict=True
    ):
        assert same_bits(one, part)
        assert same_bits(one, linear(x, weight, bias))


def test_a_strided_weight_equals_a_contiguous_one(dtype, same_bits):
    x, wide = torch.randn(20, 96).to(dtype), torch.randn(40, 200).to(dtype)
    strided = wide[:, 7:103]
    assert same_bits(linear(x, strided), linear(x, strided.clone()))
    transposed = torch.randn(96, 40).to(dtype).t()
    assert same_bits(linear(x, transposed), linear(x, transposed.contiguous()))


def test_recording_gradients_changes_no_bit(dtype, same_bits):
    x, weight = torch.randn(33, 100).to(dtype), torch.randn(37, 100).to(dtype).requires_grad_()
    with torch.no_grad():
        without = linear(x, weight)
    with_gradients = linear(x, weight)
    assert with_gradients.requires_grad
    assert same_bits(with_gradients.detach(), without)


def test_the_input_gradient_of_a_row_is_its_own(dtype, every_placing_agrees):
    weight = torch.randn(192, 576).to(dtype)
    every_placing_agrees(
        lambda upstream: linear_input_gradient((upstream,), (weight,)),
        torch.randn(512, 192).to(dtype),
    )


def test_zero_rows_at_the_end_change_no_gradient(dtype, same_bits):
    x, upstream = torch.randn(130, 100).to(dtype), torch.randn(130, 37).to(dtype)
    weight, bias = torch.randn(37, 100).to(dtype), torch.randn(37).to(dtype)
    alone = gradients(x, weight, bias, upstream)
    for extra in (1, 30, 62, 64, 200):
        padded = gradients(
            F.pad(x, (0, 0, 0, extra)), weight, bias, F.pad(upstream, (0, 0, 0, extra))
        )
        assert same_bits(padded[0][:130], alone[0])
        assert same_bits(padded[1], alone[1]), f"{extra} zero rows"
        assert same_bits(padded[2], alone[2]), f"{extra} zero rows"


def test_a_block_of_zero_rows_in_the_middle_changes_no_gradient(dtype, same_bits):
    x, upstream = torch.randn(128, 100).to(dtype), torch.randn(128, 37).to(dtype)
    x[:, 3], upstream[:, 5] = -0.0, -1e-30
    zeros = [torch.zeros(64, t.shape[1], dtype=dtype) for t in (x, upstream)]
    spread = [torch.cat((t[:64], z, t[64:])) for t, z in zip((x, upstream), zeros, strict=True)]
    assert same_bits(
        linear_weight_gradient(upstream, x), linear_weight_gradient(spread[1], spread[0])
    )


def test_a_packed_weight_gradient_goes_on_from_sequence_to_sequence(dtype, same_bits):
    parts = [(torch.randn(n, 100).to(dtype), torch.randn(n, 37).to(dtype)) for n in (64, 192, 128)]
    total = None
    for x, upstream in parts:
        total = linear_weight_gradient(upstream, x, total=total)
    x, upstream = (torch.cat(t) for t in zip(*parts, strict=True))
    assert same_bits(linear_weight_gradient(upstream, x), total)


def test_a_weight_gradient_is_the_sum_of_its_block_products(dtype, same_bits):
    x, upstream = torch.randn(320, 100).to(dtype), torch.randn(320, 37).to(dtype)
    total = torch.zeros(37, 100)
    for start in range(0, 320, 64):
        block = slice(start, start + 64)
        total = total + upstream[block].float().t() @ x[block].float()
    assert same_bits(linear_weight_gradient(upstream, x), total)
    in_one_product = upstream.float().t() @ x.float()
    assert not same_bits(linear_weight_gradient(upstream, x), in_one_product)


def test_gradients_do_not_depend_on_threads_or_strides(dtype, same_bits):
    x, upstream = torch.randn(300, 200).to(dtype), torch.randn(300, 80).to(dtype)
    weight, bias = torch.randn(40, 100).to(dtype), torch.randn(40).to(dtype)
    strided = (x[:, 50:150], weight, bias, upstream[:, 7:47])
    one = gradients(*strided)
    torch.set_num_threads(2)
    for other in (gradients(*strided), gradients(*(t.clone() for t in strided))):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def test_a_fused_caller_gets_the_input_gradient_of_separate_matrices(dtype, same_bits):
    x = torch.randn(50, 64).to(dtype).requires_grad_()
    weights = [torch.randn(n, 64).to(dtype) for n in (48, 16, 16)]
    outputs = linear_multi(x, weights, (None, None, None))
    upstream = torch.randn(50, 80).to(dtype)
    torch.cat(outputs, 1).backward(upstream)
    fused = torch.cat(weights)
    sizes = [48, 16, 16]
    rebuilt = linear_input_gradient(upstream.split(sizes, 1), fused.split(sizes))
    assert same_bits(x.grad, rebuilt)


def test_gradients_match_float64(dtype, relative_error, tolerance):
    x, upstream = torch.randn(150, 100).to(dtype), torch.randn(150, 37).to(dtype)
    weight, bias = torch.randn(37, 100).to(dtype), torch.randn(37).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    F.linear(*exact).backward(upstream.double())
    for mine, reference in zip(gradients(x, weight, bias, upstream), exact, strict=True):
        assert relative_error(mine, reference.grad) < tolerance


def test_weights_and_biases_must_pair_up():
    with pytest.raises(ValueError, match="2 weights but 1 biases"):
        linear_multi(torch.randn(2, 3), (torch.randn(4, 3),) * 2, (None,))
