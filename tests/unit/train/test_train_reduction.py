"""The tree over slots is one expression; the norm is exact; clipping only ever shrinks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from engines import numerics
from engines.train.reduction import (
    BinaryCounter,
    TreeReduceScatter,
    clip_coefficient,
    total_norm,
)


def slots(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(257, generator=generator) * 10.0**k for k in range(count)]


@pytest.mark.parametrize(
    ("count", "ranks"), [(n, r) for n in (1, 2, 4, 8, 16) for r in (1, 2, 4) if r <= n]
)
def test_rounds_of_any_number_of_ranks_add_up_to_the_same_tree(count: int, ranks: int) -> None:
    values = slots(count)
    expected = numerics.tree_sum(values)
    counter = BinaryCounter()
    for first in range(0, count, ranks):
        counter.push([numerics.tree_sum(values[first : first + ranks])])
    assert torch.equal(counter.result()[0], expected)


def test_the_tree_is_not_the_sum_from_left_to_right() -> None:
    """The control: on these values the order of additions shows."""
    values = slots(8)
    left_to_right = values[0]
    for value in values[1:]:
        left_to_right = left_to_right + value
    assert not torch.equal(numerics.tree_sum(values), left_to_right)


@pytest.mark.parametrize("count", [0, 3, 6])
def test_counter_refuses_a_tree_that_is_not_complete(count: int) -> None:
    counter = BinaryCounter()
    for value in slots(count):
        counter.push([value])
    with pytest.raises(ValueError, match=f"{count} slots"):
        counter.result()


def test_counter_starts_afresh_after_its_result() -> None:
    counter = BinaryCounter()
    counter.push([torch.ones(2)])
    counter.result()
    counter.push([torch.full((2,), 5.0)])
    assert counter.result()[0].tolist() == [5.0, 5.0]


def test_reduce_scatter_refuses_an_average() -> None:
    with pytest.raises(ValueError, match="adds"):
        TreeReduceScatter()(
            torch.zeros(1), torch.zeros(1), None, dist.ReduceOp.AVG
        )  # refused before the group is used


def test_norm_is_the_exact_root_of_the_sum_of_squares_in_any_order() -> None:
    tensors = [slots(3)[k].reshape(-1, 1) for k in range(3)]
    squares = [numerics.row_square_sums(tensor) for tensor in tensors]
    expected = math.sqrt(
        math.fsum(value for tensor in tensors for value in tensor.double().square().flatten())
    )
    assert total_norm(squares) == expected
    assert total_norm(squares[::-1]) == expected


def test_clipping_brings_the_norm_down_and_never_up() -> None:
    assert clip_coefficient(0.5, clip_grad=1.0) == 1.0
    assert clip_coefficient(0.0, clip_grad=1.0) == 1.0
    assert clip_coefficient(4.0, clip_grad=1.0) == pytest.approx(0.25, rel=1e-6)
