"""Sums that need no order, and trees whose order is written down."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.numerics import ordered_sum, row_square_sums, token_sum, tree_sum


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=60), st.randoms())
def test_ordered_sum_is_exact_whatever_the_order_and_padding(values, random):
    shuffled = values + [0.0] * 5
    random.shuffle(shuffled)
    exact = float(sum((Fraction(v) for v in values), Fraction(0)))
    assert ordered_sum(torch.tensor(values, dtype=torch.float64)) == exact
    assert ordered_sum(torch.tensor(shuffled, dtype=torch.float64)) == exact


def test_stock_sum_depends_on_the_order():
    values = torch.randn(10_000, dtype=torch.float64)
    order = torch.randperm(10_000)
    assert values.sum() != values[order].sum()
    assert ordered_sum(values) == ordered_sum(values[order])


def test_infinities_and_nan_do_not_raise():
    assert ordered_sum(torch.tensor([math.inf, 1.0])) == math.inf
    assert math.isnan(ordered_sum(torch.tensor([math.inf, -math.inf])))
    assert math.isnan(ordered_sum(torch.tensor([math.nan, 1.0])))
    assert ordered_sum(torch.tensor([1e308, 1e308], dtype=torch.float64)) == math.inf
    assert ordered_sum(torch.tensor([-1e308, -1e308], dtype=torch.float64)) == -math.inf
    assert ordered_sum(torch.tensor([1e308, 1e308, -math.inf], dtype=torch.float64)) == -math.inf


def test_a_sum_that_leaves_float64_on_the_way_is_right_in_any_order():
    values = [1e308, 1e308, -1e308, -1e308, 1.0]
    for order in itertools.permutations(values):
        assert ordered_sum(torch.tensor(order, dtype=torch.float64)) == 1.0


def test_token_sum_gives_each_value_a_gradient_of_one():
    values = torch.randn(37, requires_grad=True)
    total = token_sum(values)
    assert total.dtype == torch.float64
    assert total.item() == math.fsum(values.tolist())
    (total / 4).backward()
    assert torch.equal(values.grad, torch.full((37,), 0.25))


@pytest.mark.parametrize("shape", [(40, 576), (7, 5, 3), (300,), (1, 100_000), (5, 1), (0, 8)])
def test_shards_of_whole_rows_have_the_rows_square_sums(shape, same_bits):
    x = torch.randn(shape)
    whole = row_square_sums(x)
    assert whole.shape == (shape[0],)
    exact = x.double().reshape(shape[0], -1).square().sum(-1) if x.numel() else whole
    assert torch.allclose(whole, exact, rtol=1e-14, atol=0)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cut in range(0, shape[0] + 1, max(1, shape[0] // 5)):
            parts = (row_square_sums(x[:cut]), row_square_sums(x[cut:]))
            assert same_bits(torch.cat(parts), whole)


def test_tree_sum_adds_neighbours_first(same_bits):
    a, b, c, d, e = torch.randn(5, 1000).unbind(0)
    assert same_bits(tree_sum([a, b, c, d]), (a + b) + (c + d))
    assert same_bits(tree_sum([a, b, c, d, e]), ((a + b) + (c + d)) + e)
    assert same_bits(tree_sum([a]), a)
    assert not same_bits(tree_sum([a, b, c, d]), ((a + b) + c) + d)
    with pytest.raises(ValueError, match="no tensors"):
        tree_sum([])
