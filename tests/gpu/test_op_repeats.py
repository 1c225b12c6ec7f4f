"""The shared ops on the device, once more: beside a second stream, and replayed from a graph.

Each test has a control that must fail or a figure that must not be zero, so that it cannot pass by
comparing nothing.
"""

from __future__ import annotations

import torch

from tests.gpu.draws import assert_one_outcome_of_fifty, random


def test_fifty_repeats_beside_a_second_stream_give_one_outcome():
    """Forward and backward of a layer's ops while another stream keeps the device busy."""
    from engines import numerics

    rows, width, inner = 1024, 896, 4864
    x = random(rows, width).requires_grad_()
    norm, up = random(width, seed=1).requires_grad_(), random(2 * inner, width, seed=2, scale=0.02)
    down, qkv = random(width, inner, seed=3, scale=0.02), random(1152, width, seed=4, scale=0.02)
    leaves = [x, norm, *(weight.requires_grad_() for weight in (up, down, qkv))]
    positions = torch.arange(rows, device="cuda") % 256
    frequencies = numerics.rotary_inv_freq(1e6, 64).to("cuda")
    ids = torch.arange(rows, device="cuda") % 997
    table = random(151936, width, seed=5, scale=0.05).requires_grad_()

    def once() -> list[torch.Tensor]:
        hidden = numerics.add(numerics.embedding(ids, table), x)
        normed = numerics.rms_norm(hidden, norm, 1e-6)
        q, k, v = numerics.linear(normed, qkv).split((896, 128, 128), dim=1)
        mixed = numerics.causal_attention(
            numerics.rotary(q.view(rows, 14, 64), positions, frequencies),
            numerics.rotary(k.view(rows, 2, 64), positions, frequencies),
            v.view(rows, 2, 64), starts=(0, 256, 512, 768), lengths=(256, 200, 256, 1), scale=0.125,
        )  # fmt: skip
        hidden = numerics.add(hidden, mixed.reshape(rows, 896))
        gate, high = numerics.linear(numerics.rms_norm(hidden, norm, 1e-6), up).chunk(2, dim=1)
        hidden = numerics.add(hidden, numerics.linear(numerics.silu_mul(gate, high), down))
        scores, entropy = numerics.head_logprobs(hidden, table, ids, temperature=0.9)
        loss = scores.sum() + 0.1 * entropy.sum()
        return [scores.detach(), entropy.detach(), *torch.autograd.grad(loss, [*leaves, table])]

    assert_one_outcome_of_fifty(once)


def test_a_graph_replays_the_bits_of_the_launches_it_captured():
    from engines import numerics
    from engines.numerics import cuda

    x, residual, norm = random(8, 896), random(8, 896, seed=1), random(896, seed=2)
    weight = random(1152, 896, seed=3, scale=0.02)
    pages = random(64, 2, 16, 128, seed=4)
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(8, 8)
    starts = torch.arange(9, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1, 5, 16, 17, 64, 65, 100, 128], dtype=torch.int32, device="cuda")
    positions = torch.arange(8, device="cuda")
    frequencies = numerics.rotary_inv_freq(1e6, 64).to("cuda")
    out = torch.zeros(8, 14, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        normed, _ = cuda.add_rms_norm(x, residual, norm, 1e-6)
        q = numerics.linear(normed, weight)[:, :896].unflatten(1, (14, 64))
        cuda.attend_pages(
            numerics.rotary(q, positions, frequencies), pages[..., :64], pages[..., 64:], table,
            query_starts=starts, lengths=lengths, max_query_length=1, scale=0.125, out=out,
        )  # fmt: skip
        return numerics.silu_mul(out.view(8, -1), normed)

    with torch.no_grad():
        eager = step().clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, eager)
        x.add_(1.0)
        graph.replay()
        assert not torch.equal(captured, eager)
        assert torch.equal(captured.clone(), step())


def test_fifty_repeats_of_optimizer_norm_digest_and_log_probs_beside_a_second_stream():
    """The ops of an update that are not in a forward; many tensors in one launch."""
    from engines import numerics
    from engines.provenance.tensor_digest import digest_tensors

    shapes = ((4864, 896), (896,), (151936, 32), (1,), (300, 7))
    state = [
        [random(*shape, seed=5 * kind + i).float().abs() for i, shape in enumerate(shapes)]
        for kind in range(4)
    ]
    logits, ids = random(100, 151936, scale=3.0), torch.arange(100, device="cuda") * 997
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}

    def once() -> tuple[dict[str, str], list[torch.Tensor]]:
        live = [[tensor.clone() for tensor in tensors] for tensors in state]
        numerics.adamw_steps_(*live, step=2, **options)
        named = {f"{i}.{j}": t for i, kind in enumerate(live) for j, t in enumerate(kind)}
        scores = numerics.chosen_logprobs(logits, ids, temperature=0.7)
        return digest_tensors(named), [*numerics.many_row_square_sums(live[0]), scores]

    digests, sums = once()
    noise, busy = torch.cuda.Stream(), random(4096, 4096)
    for _ in range(50):
        with torch.cuda.stream(noise):
            for _ in range(4):
                busy = (busy @ busy).mul_(1e-3)
        again, found = once()
        assert again == digests
        assert all(map(torch.equal, found, sums))
    torch.cuda.synchronize()
    # One tensor after the other gives the same bits, and the host the same digests and sums.
    live = [[tensor.clone() for tensor in tensors] for tensors in state]
    for tensors in zip(*live, strict=True):
        numerics.adamw_step_(*tensors, step=2, **options)
    host = {f"{i}.{j}": t.cpu() for i, kind in enumerate(live) for j, t in enumerate(kind)}
    assert digest_tensors(host) == digests
    assert torch.equal(numerics.row_square_sums(host["0.2"]), sums[2].cpu())
    assert len(set(digests.values())) == len(digests)


def test_fifty_repeats_of_a_decode_step_beside_a_second_stream_give_one_outcome():
    """The ops that only the rollout runs."""
    from engines import numerics
    from engines.numerics import cuda

    x, residual, norm = random(128, 896), random(128, 896, seed=1), random(896, seed=2)
    weight, head = random(896, 896, seed=3, scale=0.03), random(151936, 896, seed=4, scale=0.05)
    pages = random(128 * 20, 2, 16, 128, seed=5)
    table = torch.randperm(128 * 20, device="cuda").to(torch.int32).view(128, 20)
    starts = torch.arange(129, dtype=torch.int32, device="cuda")
    lengths = (torch.arange(128, device="cuda") * 37 % 320 + 1).to(torch.int32)
    temperatures = torch.linspace(0.5, 1.5, 128, device="cuda")
    ids = torch.arange(256, device="cuda").view(128, 2) * 593

    def once() -> list[torch.Tensor]:
        normed, summed = cuda.add_rms_norm(x, residual, norm, 1e-6)
        out = torch.zeros(128, 14, 64, dtype=torch.bfloat16, device="cuda")
        cuda.attend_pages(
            numerics.linear(normed, weight).unflatten(1, (14, 64)), pages[..., :64],
            pages[..., 64:], table, query_starts=starts, lengths=lengths, max_query_length=1,
            scale=0.125, out=out,
        )  # fmt: skip
        logits = numerics.linear(out.view(128, -1), head).float()
        cuda.temper_(logits, starts[:-1], temperatures)
        return [summed, out, cuda.token_logprobs(logits, ids), numerics.log_softmax_rows(logits)]

    with torch.no_grad():
        first = once()
        noise, busy = torch.cuda.Stream(), random(4096, 4096)
        for _ in range(50):
            with torch.cuda.stream(noise):
                for _ in range(4):
                    busy = (busy @ busy).mul_(1e-3)
            assert all(map(torch.equal, first, once()))
        torch.cuda.synchronize()
    assert torch.equal(first[3].gather(1, ids), first[2])
    assert all(value.float().abs().max() > 0 for value in first)
