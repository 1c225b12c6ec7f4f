"""The laws of router and experts on the device, at the shape of Qwen3-30B-A3B's layer.

128 experts of 768, 8 a row, hidden size 2048; each law with a control.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.draws import assert_one_outcome_of_fifty, random

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
ROWS = (1, 2, 7, 16, 64, 65, 128, 300)


@pytest.fixture(scope="module")
def stacks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate, up and down of all experts, as vLLM stores them: gate and up side by side."""
    gate_up = random(EXPERTS, 2 * INNER, HIDDEN, seed=1, scale=0.02)
    return (*gate_up.chunk(2, dim=1), random(EXPERTS, HIDDEN, INNER, seed=2, scale=0.02))


def mixed(x, router, stacks):
    from engines import numerics
    from engines.numerics import cuda

    weights, experts = numerics.route(numerics.linear(x, router), top_k=TOP_K, normalise=True)
    return cuda.mix_experts(x, experts, weights, *stacks)


def test_a_row_does_not_see_the_other_rows_nor_how_matrices_are_stored(stacks):
    from engines import numerics

    x, router = random(600, HIDDEN), random(EXPERTS, HIDDEN, seed=3, scale=0.02)
    whole = mixed(x, router, stacks)
    for count in ROWS:
        assert torch.equal(mixed(x[:count], router, stacks), whole[:count]), count
        assert torch.equal(mixed(x[300 : 300 + count], router, stacks), whole[300 : 300 + count])
    weights, experts = numerics.route(numerics.linear(x, router), top_k=TOP_K, normalise=True)
    apart = [list(stack.contiguous().unbind(0)) for stack in stacks]
    assert torch.equal(numerics.expert_mlp(x, experts, weights, *apart), whole)
    assert not torch.equal(numerics.expert_mlp(x, experts.flip(1), weights, *apart), whole)


def test_ties_go_to_the_lowest_experts_and_weights_are_those_of_float64():
    from engines import numerics

    logits = random(500, EXPERTS)
    logits[3:6] = 0.25
    weights, experts = numerics.route(logits, top_k=TOP_K, normalise=True)
    assert experts[3:6].tolist() == [list(range(TOP_K))] * 3
    exact, wanted = torch.softmax(logits.double(), -1).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(experts, wanted[:, :TOP_K])
    exact = exact[:, :TOP_K] / exact[:, :TOP_K].sum(-1, keepdim=True)
    assert (weights - exact).abs().max() < 1e-6


def leaves(rows: int, seed: int = 0) -> list[torch.Tensor]:
    x, router = random(rows, HIDDEN, seed=seed), random(EXPERTS, HIDDEN, seed=3, scale=0.02)
    gate_up = random(EXPERTS, 2 * INNER, HIDDEN, seed=1, scale=0.02)
    down = random(EXPERTS, HIDDEN, INNER, seed=2, scale=0.02)
    return [t.requires_grad_() for t in (x, router, *gate_up[:, :INNER].unbind(0),
            *gate_up[:, INNER:].unbind(0), *down.unbind(0))]  # fmt: skip


def forward(values: list[torch.Tensor]) -> torch.Tensor:
    from engines import numerics

    x, router, *matrices = values
    weights, experts = numerics.route(numerics.linear(x, router), top_k=TOP_K, normalise=True)
    gate, up, down = (matrices[i * EXPERTS : (i + 1) * EXPERTS] for i in range(3))
    return numerics.expert_mlp(x, experts, weights, gate, up, down)


def test_fifty_repeats_beside_a_second_stream_give_one_outcome():
    values, upstream = leaves(512), random(512, HIDDEN, seed=9)

    def once() -> list[torch.Tensor]:
        out = forward(values)
        found = torch.autograd.grad(out, values, upstream)
        kinds = (found[2 + kind * EXPERTS : 2 + (kind + 1) * EXPERTS] for kind in range(3))
        return [out.detach(), *found[:2], *(torch.stack(kind) for kind in kinds)]

    assert_one_outcome_of_fifty(once)


def test_gradients_do_not_see_packing_and_are_near_float64():
    """Two sequences of 100 and 64 rows, with padding between them, together and alone."""
    values, upstream = leaves(192), random(192, HIDDEN, seed=9)
    with torch.no_grad():
        values[0][100:128] = 0
        upstream[100:128] = 0
    together = torch.autograd.grad(forward(values), values, upstream)
    for part in (slice(0, 128), slice(128, 192)):
        alone = [values[0].detach()[part].requires_grad_(), *values[1:]]
        found = torch.autograd.grad(forward(alone), alone, upstream[part])
        assert torch.equal(found[0], together[0][part])
        assert not torch.equal(found[-1], together[-1])
    exact = [value.detach().double().requires_grad_() for value in values]
    x, router, *matrices = exact
    probabilities = torch.softmax(x @ router.t(), -1)
    from engines import numerics

    _, experts = numerics.route(numerics.linear(values[0], values[1]), top_k=TOP_K, normalise=True)
    weights = probabilities.gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        gate, up, down = (matrices[kind * EXPERTS + expert] for kind in range(3))
        inner = torch.nn.functional.silu(x[rows] @ gate.t()) * (x[rows] @ up.t())
        part = (inner @ down.t()) * weights[rows, slots, None]
        out = out.index_add(0, rows, part)
    wanted = torch.autograd.grad(out, exact, upstream.double())

    def error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        a, b = (torch.cat([t.double().flatten() for t in ts]) for ts in (a, b))
        return float((a - b).norm() / b.norm())

    assert error([together[0]], [wanted[0]]) < 2e-2
    assert error([together[1]], [wanted[1]]) < 2e-2
    assert error(together[2:], wanted[2:]) < 2e-2


def test_a_graph_replays_router_and_experts(stacks):
    x, router = random(64, HIDDEN), random(EXPERTS, HIDDEN, seed=3, scale=0.02)
    with torch.no_grad():
        eager = mixed(x, router, stacks).clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mixed(x, router, stacks)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mixed(x, router, stacks)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)
        x.copy_(random(64, HIDDEN, seed=5))
        graph.replay()
        assert not torch.equal(captured, eager)
        assert torch.equal(captured.clone(), mixed(x, router, stacks))
