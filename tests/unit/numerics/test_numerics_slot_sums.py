"""Sums that go on over the micro-batches of a slot: the bits of the slot at once, for every op."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from engines import numerics
from engines.numerics.slot_sums import SlotSums

ROWS, WIDTH = 320, 24


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(x: torch.Tensor, _: slice, p: list[torch.Tensor]) -> torch.Tensor:
    return numerics.linear(x, p[0], p[1])


def norm(x: torch.Tensor, _: slice, p: list[torch.Tensor]) -> torch.Tensor:
    return numerics.rms_norm(x, p[0], 1e-6)


def embedding(x: torch.Tensor, rows: slice, p: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.randint(0, 7, (ROWS,), generator=torch.Generator().manual_seed(5))
    return numerics.embedding(ids[rows], p[0]) * x


def head(x: torch.Tensor, rows: slice, p: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.randint(0, 30, (ROWS,), generator=torch.Generator().manual_seed(6))
    logprobs, entropy = numerics.head_logprobs(x, p[0], ids[rows], temperature=0.7)
    return (logprobs + entropy)[:, None].expand(x.shape).to(x.dtype)


def experts(x: torch.Tensor, _: slice, p: list[torch.Tensor]) -> torch.Tensor:
    weights, chosen = numerics.route(numerics.linear(x, p[0]), top_k=2, normalise=True)
    return numerics.expert_mlp(x, chosen, weights, p[1:5], p[5:9], p[9:13])


OPS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "linear": (linear, [(WIDTH, WIDTH), (WIDTH,)]),
    "norm": (norm, [(WIDTH,)]),
    "embedding": (embedding, [(7, WIDTH)]),
    "head": (head, [(30, WIDTH)]),
    "experts": (experts, [(4, WIDTH), *[(16, WIDTH)] * 8, *[(WIDTH, 16)] * 4]),
}
CUTS = ((0, 64, ROWS), (0, 192, 256, ROWS), (0, 64, 128, 192, 256, ROWS))


def slot_gradients(
    name: str, dtype: torch.dtype, cut: tuple[int, ...]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Gradients of the op's parameters, and whether any was there before the last part."""
    op, shapes = OPS[name]
    leaves = [
        random(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)
    ]
    x = random(ROWS, WIDTH, dtype=dtype, seed=90).requires_grad_()
    upstream = random(ROWS, WIDTH, dtype=dtype, seed=91)
    sums, early = SlotSums(), []
    for first, end in pairwise(cut):
        with sums.part(last=end == cut[-1]):
            op(x[first:end], slice(first, end), leaves).backward(upstream[first:end])
        if end != cut[-1]:
            early += [leaf.grad is not None for leaf in leaves]
    found = []
    for leaf in (*leaves, x):
        assert leaf.grad is not None
        found.append(leaf.grad)
    return found, early


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_every_op_goes_on_from_the_sums_of_earlier_parts(name: str, dtype: torch.dtype) -> None:
    whole, _ = slot_gradients(name, dtype, (0, ROWS))
    for cut in CUTS:
        found, early = slot_gradients(name, dtype, cut)
        assert not any(early)
        for index, (one, two) in enumerate(zip(found, whole, strict=True)):
            assert torch.equal(one, two), (cut, index)


@pytest.mark.parametrize("name", OPS)
def test_parts_that_are_rounded_each_have_other_bits(name: str) -> None:
    """The control: what autograd would add up by itself."""
    op, shapes = OPS[name]
    leaves = [
        random(*shape, dtype=torch.bfloat16, seed=i).requires_grad_()
        for i, shape in enumerate(shapes)
    ]
    x = random(ROWS, WIDTH, dtype=torch.bfloat16, seed=90)
    upstream = random(ROWS, WIDTH, dtype=torch.bfloat16, seed=91)
    for first in range(0, ROWS, 64):
        rows = slice(first, first + 64)
        op(x[rows], rows, leaves).backward(upstream[rows])
    whole, _ = slot_gradients(name, torch.bfloat16, (0, ROWS))
    assert any(
        not torch.equal(leaf.grad, wanted)
        for leaf, wanted in zip(leaves, whole, strict=False)
        if leaf.grad is not None
    )


def test_outside_of_a_slot_in_parts_nothing_is_kept() -> None:
    sums = SlotSums()
    weight = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="stopped"), sums.part(last=False):
        raise RuntimeError("stopped")
    numerics.linear(torch.ones(1, 3), weight).sum().backward()
    assert weight.grad is not None
