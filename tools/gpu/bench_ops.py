"""Times of the shared ops on the device at the shapes of Qwen2.5-0.5B, and what bounds each.

    export CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_WORKSPACE_SIZE=1
    python3 -m tools.gpu.bench_ops [OUT.json]

Median of CUDA-event times over fresh inputs that do not fit the L2 cache together; prints a row an
op: microseconds, TFLOP/s or GB/s.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engines import numerics
from engines.numerics import cuda


def median_us(op: Callable[[], Any], *, repeats: int = 20, captured: bool = True) -> float:
    """Return the median microseconds of `op` after three warm-ups, with the L2 cache flushed.

    Where it is captured in a CUDA graph first, the host's time to launch is not in it.
    """
    if captured:
        op = replayed(op)
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    times = []
    for number in range(repeats + 3):
        flush.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        op()
        last.record()
        last.synchronize()
        if number >= 3:
            times.append(first.elapsed_time(last) * 1e3)
    return statistics.median(times)


def replayed(op: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a graph of `op`, without gradients."""
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            op()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op()
    return graph.replay


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return bfloat16 noise."""
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def products() -> dict[str, dict[str, float]]:
    """Time forward, input gradient and weight gradient, cuBLAS beside the first."""
    rows = {}
    for name, (inner, outer) in {
        "qkv": (896, 1152), "gate_up": (896, 9728), "down": (4864, 896), "head": (896, 151936),
    }.items():  # fmt: skip
        weight = random(outer, inner, scale=0.02)
        for count in (128, 4096):
            x = random(count, inner)
            flops = 2e-6 * count * inner * outer
            for kind, op in {
                "cublas": lambda x=x, w=weight: torch.nn.functional.linear(x, w),
                "ours": lambda x=x, w=weight: numerics.linear(x, w),
            }.items():
                us = median_us(op)
                rows[f"{name} {count} {kind}"] = {"us": us, "TFLOP/s": flops / us}
        gradient = random(4096, outer)
        x = random(4096, inner)
        flops = 2e-6 * 4096 * inner * outer
        us = median_us(lambda g=gradient, w=weight: numerics.linear_input_gradient((g,), (w,)))
        rows[f"{name} 4096 dX"] = {"us": us, "TFLOP/s": flops / us}
        us = median_us(lambda g=gradient, x=x: numerics.linear_weight_gradient(g, x))
        rows[f"{name} 4096 dW"] = {"us": us, "TFLOP/s": flops / us}
    return rows


def attention() -> dict[str, dict[str, float]]:
    """Time decode over pages, and the packed forward and backward."""
    rows = {}
    for requests, length in ((128, 300), (256, 1024)):
        pages = random(requests * length // 16 + requests, 16, 2, 128).transpose(1, 2)
        per_request = length // 16 + 1
        table = torch.arange(requests * per_request, dtype=torch.int32, device="cuda")
        table = (table % pages.shape[0]).view(requests, per_request)
        starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
        q = random(requests, 14, 64)
        out = torch.empty_like(q)
        us = median_us(
            lambda q=q, p=pages, t=table, s=starts, n=lengths, o=out: cuda.attend_pages(
                q,
                p[..., :64],
                p[..., 64:],
                t,
                query_starts=s,
                lengths=n,
                max_query_length=1,
                scale=0.125,
                out=o,
            )
        )
        rows[f"decode {requests} x {length}"] = {
            "us": us, "GB/s": requests * length * 512e-3 / us,
        }  # fmt: skip
    count, length = 32, 512
    values = [random(count * length, heads, 64).requires_grad_() for heads in (14, 2, 2)]
    spans = {
        "starts": tuple(range(0, count * length, length)), "lengths": (length,) * count,
        "scale": 0.125,
    }  # fmt: skip
    flops = 2e-6 * 2 * count * 14 * 64 * length * length / 2
    us = median_us(lambda: numerics.causal_attention(*values, **spans))
    rows["packed 32 x 512 forward"] = {"us": us, "TFLOP/s": flops / us}
    result = numerics.causal_attention(*values, **spans)
    upstream = torch.randn_like(result)
    us = median_us(
        lambda: torch.autograd.grad(result, values, upstream, retain_graph=True), captured=False
    )
    rows["packed 32 x 512 backward"] = {"us": us, "TFLOP/s": 2.5 * flops / us}
    return rows


def others() -> dict[str, dict[str, float]]:
    """Time what memory bounds."""
    rows = {}

    def add(name: str, op: Callable[[], Any], gigabytes: float, *, captured: bool = True) -> None:
        us = median_us(op, captured=captured)
        rows[name] = {"us": us, "GB/s": gigabytes * 1e6 / us}

    x, residual, weight = random(16384, 896), random(16384, 896), random(896)
    size = x.numel() * 2e-9
    add("rms_norm 16384", lambda: numerics.rms_norm(x, weight, 1e-6), 2 * size)
    add("add_rms_norm 16384", lambda: cuda.add_rms_norm(x, residual, weight, 1e-6), 4 * size)
    gate, up = random(16384, 2 * 4864).chunk(2, dim=1)
    add("silu_mul 16384", lambda: numerics.silu_mul(gate, up), 3 * gate.numel() * 2e-9)
    q, positions = random(16384, 14, 64), torch.arange(16384, device="cuda") % 512
    frequencies = numerics.rotary_inv_freq(1e6, 64).to("cuda")
    add("rotary 16384", lambda: numerics.rotary(q, positions, frequencies), 2 * size)
    logits = random(128, 151936)
    ids = torch.arange(128, device="cuda")
    add(
        "chosen_logprobs 128 x 151936",
        lambda: numerics.chosen_logprobs(logits, ids, temperature=1.0),
        logits.numel() * 2e-9,
    )
    state = [torch.randn(64 << 20, device="cuda").abs() for _ in range(4)]
    options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
    # Those that copy a table of addresses to the device cannot be captured.
    add(
        "adamw 67M",
        lambda: numerics.adamw_step_(*state, step=2, **options),
        7 * 0.268435456,
        captured=False,
    )
    words = state[0].view(torch.int32).view(-1, 1024)
    add(
        "digest 67M",
        lambda: cuda.digest_sums([cuda.WordBlock(words, 0, 1024)]),
        0.268435456,
        captured=False,
    )
    matrix = state[0].view(-1, 1024)
    add(
        "row_square_sums 67M",
        lambda: numerics.row_square_sums(matrix),
        0.268435456,
        captured=False,
    )
    token_ids = torch.randint(151936, (16384,), device="cuda")
    table = random(151936, 896, scale=0.02).requires_grad_()
    looked_up = numerics.embedding(token_ids, table)
    upstream = torch.randn_like(looked_up)
    add(
        "embedding gradient 16384",
        lambda: torch.autograd.grad(looked_up, table, upstream, retain_graph=True),
        table.numel() * 10e-9,
        captured=False,
    )
    return rows


def experts() -> dict[str, dict[str, float]]:
    """Time router and experts of Qwen3-30B-A3B's layer: 128 experts of 768, 8 a row."""
    rows = {}
    router = random(128, 2048, scale=0.02)
    gate_up, down = random(128, 1536, 2048, scale=0.02), random(128, 2048, 768, scale=0.02)
    stacks = (*gate_up.chunk(2, dim=1), down)
    for count in (128, 4096):
        x = random(count, 2048)
        logits = numerics.linear(x, router)
        us = median_us(lambda z=logits: numerics.route(z, top_k=8, normalise=True))
        rows[f"route {count} x 128"] = {"us": us}
        weights, chosen = numerics.route(logits, top_k=8, normalise=True)
        us = median_us(lambda x=x, c=chosen, w=weights: cuda.mix_experts(x, c, w, *stacks))
        rows[f"experts {count}"] = {
            "us": us,
            "TFLOP/s": 2e-6 * count * 8 * 3 * 768 * 2048 / us,
            "GB/s": (gate_up.numel() + down.numel()) * 2e-3 / us,
        }
    leaves = [x, weights, *(list(stack.contiguous().unbind(0)) for stack in stacks)]
    flat = [x, weights, *(t for stack in leaves[2:] for t in stack)]
    for leaf in flat:
        leaf.requires_grad_()
    out = numerics.expert_mlp(x, chosen, weights, *leaves[2:])
    upstream = torch.randn_like(out)
    us = median_us(
        lambda: torch.autograd.grad(out, flat, upstream, retain_graph=True), captured=False
    )
    rows["experts 4096 backward"] = {"us": us, "TFLOP/s": 9e-6 * 4096 * 8 * 2 * 768 * 2048 / us}
    return rows


def many() -> dict[str, dict[str, float]]:
    """Time what takes all tensors of SmolLM2-135M at once, the host's part included."""
    from engines.provenance.tensor_digest import digest_tensors
    from model_specs.families.decoder import parameter_shapes
    from model_specs.registry import load_recipe

    shapes = parameter_shapes(load_recipe("gsm8k_smollm2_135m").model)
    state = [
        {name: torch.randn(*shape, device="cuda").abs() for name, shape in shapes.items()}
        for _ in range(4)
    ]
    size = sum(tensor.numel() for tensor in state[0].values()) * 4e-9
    options = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
    ops = {
        "adamw": (lambda: numerics.adamw_steps_(*map(list, values), step=2, **options), 7),
        "norm": (lambda: numerics.many_row_square_sums(values[0]), 1),
        "digest": (lambda: digest_tensors(state[0]), 1),
    }
    values = [list(kind.values()) for kind in state]
    rows = {}
    for name, (op, passes) in ops.items():
        us = wall_us(op)
        rows[f"{name} of {len(shapes)} tensors, wall"] = {
            "us": us,
            "GB/s": passes * size * 1e6 / us,
        }
    return rows


def wall_us(op: Callable[[], Any], *, repeats: int = 10) -> float:
    """Return the median microseconds until the device is done with `op`, by the host's clock."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        op()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[2:])


def main() -> None:
    """Measure group by group; print and write after each."""
    rows: dict[str, dict[str, float]] = {}
    for group in (products, attention, others, experts, many):
        found = group()
        rows |= found
        for name, row in found.items():
            figures = "  ".join(f"{value:10.1f} {unit}" for unit, value in row.items())
            print(f"{name:34}", figures, flush=True)
        report = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows,
        }  # fmt: skip
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
