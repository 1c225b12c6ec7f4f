"""Router and experts: a row's bits are its own, ties are fixed, gradients do not see packing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engines.numerics import expert_mlp, linear, route

EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 40, 24


@pytest.fixture
def matrices(dtype):
    gate_up = [torch.randn(2 * INNER, HIDDEN).div(6).to(dtype) for _ in range(EXPERTS)]
    down = [torch.randn(HIDDEN, INNER).div(5).to(dtype) for _ in range(EXPERTS)]
    return gate_up, down


def mixture(hidden, router, gate_up, down):
    weights, experts = route(linear(hidden, router), top_k=TOP_K, normalise=True)
    return experts_of(hidden, experts, weights, gate_up, down)


def experts_of(hidden, experts, weights, gate_up, down):
    """The op on fused storage: gate rows first."""
    gate, up = zip(*(matrix.chunk(2) for matrix in gate_up), strict=True)
    return expert_mlp(hidden, experts, weights, gate, up, down)


def gradients(hidden, router, gate_up, down, upstream):
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, router, *gate_up, *down)]
    x, r, *rest = leaves
    mixture(x, r, rest[:EXPERTS], rest[EXPERTS:]).backward(upstream)
    return [leaf.grad for leaf in leaves]


def test_rows_of_a_mixture_are_independent_of_count_place_stride_and_threads(
    dtype, matrices, every_placing_agrees
):
    router = torch.randn(EXPERTS, HIDDEN).to(dtype)
    rows = torch.randn(128, HIDDEN).to(dtype)
    every_placing_agrees(lambda x: mixture(x, router, *matrices), rows)
    every_placing_agrees(lambda x: route(linear(x, router), top_k=2, normalise=False)[0], rows)


def test_equal_probabilities_go_to_the_lowest_experts(dtype):
    logits = torch.tensor([[0.0] * 6, [1.0, 2.0, 2.0, 2.0, 1.0, 2.0]], dtype=dtype)
    weights, experts = route(logits, top_k=3, normalise=True)
    assert experts.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert torch.equal(weights, torch.full((2, 3), 1 / 3))
    assert route(logits[:, :2].contiguous(), top_k=1, normalise=False)[1].tolist() == [[0], [1]]


def test_weights_are_probabilities_largest_first():
    logits = torch.randn(50, EXPERTS)
    weights, experts = route(logits, top_k=TOP_K, normalise=False)
    probabilities = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(
        weights.double(), probabilities.gather(1, experts), rtol=1e-6, atol=0
    )
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())
    normalised, same = route(logits, top_k=TOP_K, normalise=True)
    assert torch.equal(same, experts)
    torch.testing.assert_close(normalised.sum(-1), torch.ones(50))


def test_more_experts_a_row_than_there_are_is_refused():
    with pytest.raises(ValueError, match="top_k is 7, but there are 6 experts"):
        route(torch.zeros(2, 6), top_k=7, normalise=True)
    weights, experts = route(torch.zeros(1, 6), top_k=1, normalise=True)
    one = [torch.zeros(2, 2)] * 6
    with pytest.raises(ValueError, match="6 gate, 6 up and 5 down"):
        expert_mlp(torch.zeros(1, 2), experts, weights, one, one, one[:5])


@pytest.mark.parametrize("normalise", [True, False])
def test_router_gradient_matches_float64_autograd(normalise):
    logits = torch.randn(33, EXPERTS, requires_grad=True)
    upstream = torch.randn(33, TOP_K)
    weights, experts = route(logits, top_k=TOP_K, normalise=normalise)
    weights.backward(upstream)
    exact = logits.detach().double().requires_grad_()
    chosen = torch.softmax(exact, -1).gather(1, experts)
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    chosen.backward(upstream.double())
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_mixture_and_its_gradients_match_stock_transformers_in_float64():
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    stock = Qwen3MoeSparseMoeBlock(config).double()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, upstream = torch.randn(130, HIDDEN), torch.randn(130, HIDDEN)
    exact = hidden.double().requires_grad_()
    # Stock routing computes in float32 whatever the dtype: give it float64.
    expected = float64_block(stock, exact)
    expected.backward(upstream.double())
    gate_up = [m.float() for m in stock.experts.gate_up_proj.detach()]
    down = [m.float() for m in stock.experts.down_proj.detach()]
    router = stock.gate.weight.detach().float()
    torch.testing.assert_close(
        mixture(hidden, router, gate_up, down).double(), expected.detach(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        stock(hidden.double()[None])[0], expected, rtol=1e-5, atol=1e-5, check_dtype=False
    )
    of_hidden, of_router, *rest = gradients(hidden, router, gate_up, down, upstream)
    for ours, true in (
        (of_hidden, exact.grad),
        (of_router, stock.gate.weight.grad),
        (torch.stack(rest[:EXPERTS]), stock.experts.gate_up_proj.grad),
        (torch.stack(rest[EXPERTS:]), stock.experts.down_proj.grad),
    ):
        assert float((ours.double() - true).norm() / true.norm()) < 5e-6


def float64_block(stock, hidden):
    probabilities = torch.softmax(F.linear(hidden, stock.gate.weight), -1)
    weights, experts = probabilities.topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    return stock.experts(hidden, experts, weights)


def test_weight_gradients_are_those_of_one_sequence_after_the_other(dtype, matrices, same_bits):
    """Packed together or summed on: blocks of 64 rows belong to one sequence."""
    router = torch.randn(EXPERTS, HIDDEN).to(dtype)
    lengths = (130, 20, 64)
    padded = [-(-n // 64) * 64 for n in lengths]
    parts, upstreams = [], []
    for length, rows in zip(lengths, padded, strict=True):
        for made in (parts, upstreams):
            part = torch.zeros(rows, HIDDEN)
            part[:length] = torch.randn(length, HIDDEN)
            made.append(part.to(dtype))
    packed = gradients(torch.cat(parts), router, *matrices, torch.cat(upstreams))
    # Zero rows behind and whole zero blocks in between change nothing, in no gradient.
    spaced_rows = [torch.cat((p, torch.zeros(64, HIDDEN, dtype=dtype))) for p in parts]
    spaced_upstream = [torch.cat((p, torch.zeros(64, HIDDEN, dtype=dtype))) for p in upstreams]
    spaced = gradients(torch.cat(spaced_rows), router, *matrices, torch.cat(spaced_upstream))
    for one, other in zip(packed[1:], spaced[1:], strict=True):
        assert same_bits(one + 0.0, other + 0.0)
    # Row gradients of a sequence do not depend on what it is packed with.
    alone = [gradients(p, router, *matrices, u) for p, u in zip(parts, upstreams, strict=True)]
    for mine, whole in zip(alone, packed[0].split(padded), strict=True):
        assert same_bits(mine[0], whole)
    # In float32, where nothing is rounded in between, the first two add up to what both give.
    if dtype == torch.float32:
        both = gradients(torch.cat(parts[1:]), router, *matrices, torch.cat(upstreams[1:]))
        for first, second, together in zip(alone[1], alone[2], both, strict=True):
            if first.shape == together.shape and first is not alone[1][0]:
                assert same_bits(first + second, together)


def test_an_expert_without_a_row_has_a_gradient_of_zeros(dtype, matrices):
    hidden = torch.randn(5, HIDDEN).to(dtype)
    experts = torch.tensor([[0, 1], [1, 0], [0, 2], [2, 1], [1, 2]])
    gate_up, down = ([m.clone().requires_grad_() for m in group] for group in matrices)
    out = experts_of(hidden, experts, torch.full((5, 2), 0.5), gate_up, down)
    out.sum().backward()
    for unused in (gate_up[4], down[5]):
        assert unused.grad is not None
        assert not unused.grad.any()
    assert gate_up[1].grad is not None
    assert bool(gate_up[1].grad.any())


def test_results_are_added_in_slot_order_not_in_order_of_experts(matrices, dtype, same_bits):
    hidden = torch.randn(64, HIDDEN).to(dtype)
    weights, experts = route(torch.randn(64, EXPERTS), top_k=TOP_K, normalise=True)
    straight = experts_of(hidden, experts, weights, *matrices)
    total = torch.zeros(64, HIDDEN)
    for slot in range(TOP_K):
        one, alone = torch.ones(64, 1), experts[:, slot : slot + 1]
        part = experts_of(hidden, alone, one, *matrices).float()
        scaled = part * weights[:, slot : slot + 1]
        total = scaled if slot == 0 else total + scaled
    assert same_bits(straight, total.to(dtype))
    turned = experts_of(hidden, experts.flip(1), weights.flip(1), *matrices)
    if dtype == torch.float32:
        assert not same_bits(straight, turned)
