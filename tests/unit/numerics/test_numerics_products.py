"""bfloat16 on a CPU without kernels for it: multiplied in float32, rounded once, same laws."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engines.numerics import (
    expert_mlp,
    head_logprobs,
    linear,
    linear_input_gradient,
    linear_multi,
    products,
    route,
)


@pytest.fixture(params=[True, False], ids=["with kernels", "without kernels"])
def has_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "has_bfloat16_kernels", lambda: request.param)
    return request.param


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_kernels_are_there_from_avx512_on() -> None:
    of_x86 = platform.machine() == "x86_64"
    needed = {"avx512bw", "avx512vl", "avx512dq"} if of_x86 else {"bf16"}
    # Not `cpu_facts`, which leaves out flags that follow from others.
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    assert found is not None
    assert products.has_bfloat16_kernels() == (needed <= set(found[1].split()))


def test_only_bfloat16_without_kernels_is_multiplied_in_another_dtype(has_kernels: bool) -> None:
    assert products.product_dtype(torch.float32) == torch.float32
    expected = torch.bfloat16 if has_kernels else torch.float32
    assert products.product_dtype(torch.bfloat16) == expected


def test_a_product_is_torchs_own_on_padded_rows(has_kernels, same_bits) -> None:
    x, weight, bias = draw(20, 100), draw(37, 100), draw(37)
    padded = F.pad(x, (0, 0, 0, 12))
    found = products.padded_linear(x, weight, bias), products.padded_matmul(x, weight.t())
    if has_kernels:
        assert same_bits(found[0], F.linear(padded, weight, bias))
        assert same_bits(found[1], padded @ weight.t().contiguous())
        return
    exact = F.linear(padded.double(), weight.double(), bias.double())
    # Float32 errs by far less than half a unit of bfloat16, so all but ties come out rounded right.
    rounded_right = (found[0] == exact.to(torch.bfloat16)).double().mean()
    assert rounded_right > 0.99
    assert float((found[0].double() - exact).abs().max() / exact.abs().max()) < 2**-8


def test_rows_of_every_op_that_multiplies_are_their_own(has_kernels, every_placing_agrees) -> None:
    weight, bias, head = draw(48, 40), draw(48), draw(101, 40)
    every_placing_agrees(lambda x: linear(x, weight, bias), draw(256, 40))
    every_placing_agrees(lambda g: linear_input_gradient((g, g), (weight, weight)), draw(256, 48))
    ids = torch.zeros(256, dtype=torch.int64)
    every_placing_agrees(
        lambda x: torch.stack(head_logprobs(x, head, ids[: len(x)], temperature=0.7), 1),
        draw(256, 40),
    )
    inner = [[draw(24, 40) for _ in range(4)] for _ in range(2)]
    down = [draw(40, 24) for _ in range(4)]
    router = draw(4, 40)

    def mixture(x: torch.Tensor) -> torch.Tensor:
        weights, experts = route(linear(x, router), top_k=2, normalise=True)
        return expert_mlp(x, experts, weights, *inner, down)

    every_placing_agrees(mixture, draw(128, 40))


@pytest.mark.parametrize("rows", [1, 16, 50])
def test_fused_columns_equal_separate_matrices(rows: int, has_kernels, same_bits) -> None:
    x, weights = draw(rows, 576), [draw(n, 576) for n in (576, 192, 37)]
    fused = linear(x, torch.cat(weights)).split([len(weight) for weight in weights], 1)
    for one, part in zip(linear_multi(x, weights, [None] * 3), fused, strict=True):
        assert same_bits(one, part)


def test_each_of_several_products_is_rounded_before_they_are_added(has_kernels, same_bits) -> None:
    """The input gradient has one definition on every CPU: parts in the compute dtype."""
    upstream, weights = [draw(16, 37) for _ in range(3)], [draw(37, 100) for _ in range(3)]
    parts = [products.padded_matmul(g, w).float() for g, w in zip(upstream, weights, strict=True)]
    expected = ((parts[0] + parts[1]) + parts[2]).to(torch.bfloat16)
    assert same_bits(linear_input_gradient(upstream, weights), expected)
