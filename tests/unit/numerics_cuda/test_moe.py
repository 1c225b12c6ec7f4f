"""Laws of router and experts, beside the CPU's ops."""

from __future__ import annotations

import math

import pytest
import torch

from engines.numerics.experts import expert_mlp as cpu_expert_mlp
from engines.numerics.router import route as cpu_route
from engines.numerics.slot_sums import SlotSums

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies and rounds bfloat16 wrongly; the kernels take either."""
DTYPES = (torch.float32, HALF)
EXPERTS, TOP_K, HIDDEN, INNER = 5, 3, 24, 20


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.cpu().double() - wanted.double()).norm() / wanted.double().norm()).item()


def matrices(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    shapes = [(INNER, HIDDEN)] * (2 * EXPERTS) + [(HIDDEN, INNER)] * EXPERTS
    return [(random(*shape, seed=9 + i) / 5).to(dtype).to(device) for i, shape in enumerate(shapes)]


def parts(flat: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [flat[kind * EXPERTS : (kind + 1) * EXPERTS] for kind in range(3)]


def gradients(op, device, hidden, experts, weights, upstream):
    """Return the result and the gradients of hidden, weights and all matrices."""
    leaves = [
        t.to(device).detach().requires_grad_() for t in (hidden, weights, *matrices(hidden.dtype))
    ]
    out = op(leaves[0], experts.to(device), leaves[1], *parts(leaves[2:]))
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(device))]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_and_their_gradient_are_those_of_the_cpu_definition(device, dtype, normalise):
    from engines.numerics import cuda

    logits, upstream = random(33, 12, dtype=dtype), random(33, TOP_K, seed=1)
    results = []
    for op, place in ((cuda.route, device), (cpu_route, "cpu")):
        leaf = logits.to(place).detach().requires_grad_()
        weights, experts = op(leaf, top_k=TOP_K, normalise=normalise)
        (gradient,) = torch.autograd.grad(weights, leaf, upstream.to(place))
        results.append((weights.detach(), experts, gradient))
    (weights, experts, found), (reference, chosen, wanted) = results
    assert torch.equal(experts.cpu(), chosen)
    assert error(weights, reference) < 1e-6
    assert error(found, wanted) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_probabilities_go_to_the_lowest_experts(device, dtype):
    from engines.numerics import cuda

    logits = torch.tensor([[0.0] * 6, [1.0, 2.0, 2.0, 2.0, 1.0, 2.0]], dtype=dtype).to(device)
    weights, experts = cuda.route(logits, top_k=3, normalise=True)
    assert experts.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert torch.equal(weights.cpu(), torch.full((2, 3), 1 / 3))


def test_a_row_of_no_numbers_goes_to_experts_that_exist_and_spoils_no_other(device):
    from engines.numerics import cuda

    logits = random(3, 6).to(device)
    whole = cuda.route(logits, top_k=3, normalise=True)
    logits[1, 4] = math.nan
    weights, experts = cuda.route(logits, top_k=3, normalise=True)
    assert torch.isnan(weights).all(1).tolist() == [False, True, False]
    assert experts[1].tolist() == [0, 1, 2]
    for row in (0, 2):
        assert torch.equal(weights[row], whole[0][row])
        assert torch.equal(experts[row], whole[1][row])
    with pytest.raises(ValueError, match="top_k is 7, but there are 6 experts"):
        cuda.route(logits, top_k=7, normalise=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_and_their_gradients_are_those_of_the_cpu_definition(device, dtype):
    from engines.numerics import cuda

    hidden, upstream = random(70, HIDDEN, dtype=dtype), random(70, HIDDEN, dtype=dtype, seed=1)
    # The last expert is never chosen: its gradient is zero.
    weights, experts = cpu_route(random(70, EXPERTS - 1, seed=2), top_k=TOP_K, normalise=True)
    ours = gradients(cuda.expert_mlp, device, hidden, experts, weights, upstream)
    theirs = gradients(cpu_expert_mlp, "cpu", hidden, experts, weights, upstream)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    for index, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if (index - 3) % EXPERTS == EXPERTS - 1 and index >= 3:
            assert not found.any()
        else:
            assert error(found, wanted) < bound, index


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_the_experts_is_its_own_and_stacks_are_read_in_place(device, dtype):
    from engines.numerics import cuda

    hidden = random(70, HIDDEN, dtype=dtype).to(device)
    weights, experts = cpu_route(random(70, EXPERTS, seed=2), top_k=TOP_K, normalise=True)
    weights, experts = weights.to(device), experts.to(device)
    gate, up, down = parts(matrices(dtype, device))
    whole = cuda.expert_mlp(hidden, experts, weights, gate, up, down)
    for first, last in ((0, 1), (5, 7), (64, 70)):
        part = slice(first, last)
        alone = cuda.expert_mlp(hidden[part], experts[part], weights[part], gate, up, down)
        assert torch.equal(alone, whole[part])
    # As vLLM stores them: gate and up of an expert in one matrix.
    fused = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
    mixed = cuda.mix_experts(
        hidden, experts.to(torch.int32), weights, fused[:, :INNER], fused[:, INNER:],
        torch.stack(down),
    )  # fmt: skip
    assert torch.equal(mixed, whole)


def test_results_are_added_in_slot_order(device):
    from engines.numerics import cuda

    hidden = random(64, HIDDEN).to(device)
    weights, experts = cpu_route(random(64, EXPERTS, seed=2), top_k=TOP_K, normalise=True)
    weights, experts = weights.to(device), experts.to(device)
    stacks = parts(matrices(torch.float32, device))
    straight = cuda.expert_mlp(hidden, experts, weights, *stacks)
    total = torch.zeros(64, HIDDEN, device=device)
    for slot in range(TOP_K):
        one, alone = torch.ones(64, 1, device=device), experts[:, slot : slot + 1]
        total = total + cuda.expert_mlp(hidden, alone, one, *stacks) * weights[:, slot, None]
    assert torch.equal(straight, total)
    assert not torch.equal(
        cuda.expert_mlp(hidden, experts.flip(1), weights.flip(1), *stacks), straight
    )


def test_gradients_do_not_see_what_is_packed_together(device):
    from engines.numerics import cuda

    def run(rows, upstreams):
        hidden, upstream = torch.cat(rows), torch.cat(upstreams)
        weights, experts = cpu_route(hidden[:, :EXPERTS], top_k=2, normalise=True)
        return gradients(cuda.expert_mlp, device, hidden, experts, weights, upstream)

    def padded(length, rows, seed):
        filled = torch.zeros(rows, HIDDEN)
        filled[:length] = random(length, HIDDEN, seed=seed)
        return filled

    shapes = ((70, 128), (20, 64))
    rows = [padded(*shape, seed) for seed, shape in enumerate(shapes)]
    upstreams = [padded(*shape, seed + 5) for seed, shape in enumerate(shapes)]
    zeros = torch.zeros(64, HIDDEN)
    packed = run(rows, upstreams)
    # Of the matrices: a whole block of zeros in between changes nothing.
    spaced = run([rows[0], zeros, rows[1]], [upstreams[0], zeros, upstreams[1]])
    assert all(map(torch.equal, packed[3:], spaced[3:]))
    alone = [run([row], [upstream]) for row, upstream in zip(rows, upstreams, strict=True)]
    for found, part in zip(alone, (slice(0, 128), slice(128, 192)), strict=True):
        assert all(torch.equal(found[index], packed[index][part]) for index in range(3))
    for first, second, both in zip(*(found[3:] for found in alone), packed[3:], strict=True):
        assert error(first + second, both.cpu()) < 1e-6
        assert not torch.equal(first, both)
    # Run one after the other as parts of one slot: no chunk of rows reaches across a boundary.
    sums, leaves = SlotSums(), []
    for number, (row, upstream) in enumerate(zip(rows, upstreams, strict=True)):
        weights, experts = cpu_route(row[:, :EXPERTS], top_k=2, normalise=True)
        leaves = [matrix.to(device).requires_grad_() for matrix in matrices(torch.float32)]
        with sums.part(last=number == 1):
            out = cuda.expert_mlp(
                row.to(device), experts.to(device), weights.to(device), *parts(leaves)
            )
            out.backward(upstream.to(device))
        assert all((leaf.grad is None) == (number == 0) for leaf in leaves)
    for leaf, both in zip(leaves, packed[3:], strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, both)
