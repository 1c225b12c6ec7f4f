"""Compare the cost of each shared op with torch's own, at the shapes of SmolLM2-135M.

Prints, for each op and dtype, milliseconds of ours and of torch's, and their ratio, forward and
forward plus backward, on one thread. The best of several runs is taken: other work on the machine
only ever adds time.

    python -m tools.bench_numerics [--rows 1024] [--repeats 5] [--only linear]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from engines import numerics

HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64
SEQUENCE = 256
DECODE_REQUESTS, DECODE_LENGTH = 16, 250

Case = tuple[str, Callable[[], object], Callable[[], object], bool]
"""Name, ours, torch's, and whether there is a backward."""


def _leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).mul_(0.1).to(dtype).requires_grad_()


def _stock_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _stock_rotary(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    angle = positions.float()[:, None] * inv_freq
    angle = torch.cat((angle, angle), -1)[:, None]
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)


def _stock_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.unflatten(0, (-1, SEQUENCE)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _stock_head(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logprobs = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, ids[:, None])[:, 0] + entropy


def _matrix_cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x, wide = _leaf(rows, HIDDEN, dtype=dtype), _leaf(rows, INTERMEDIATE, dtype=dtype)
    up = _leaf(INTERMEDIATE, HIDDEN, dtype=dtype)
    down = _leaf(HIDDEN, INTERMEDIATE, dtype=dtype)
    shapes = (HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM)
    qkv = [_leaf(n, HIDDEN, dtype=dtype) for n in shapes]
    one = x.detach()[:1]
    yield "linear up", lambda: numerics.linear(x, up), lambda: F.linear(x, up), True
    yield "linear down", lambda: numerics.linear(wide, down), lambda: F.linear(wide, down), True
    yield (
        "linear_multi q, k, v",
        lambda: torch.cat(numerics.linear_multi(x, qkv, (None, None, None)), 1),
        lambda: torch.cat([F.linear(x, w) for w in qkv], 1),
        True,
    )
    yield "linear up, 1 row", lambda: numerics.linear(one, up), lambda: F.linear(one, up), False


def _row_cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    x, gate, up = (_leaf(rows, n, dtype=dtype) for n in (HIDDEN, INTERMEDIATE, INTERMEDIATE))
    norm, table = _leaf(HIDDEN, dtype=dtype), _leaf(VOCABULARY, HIDDEN, dtype=dtype)
    ids = torch.randint(0, VOCABULARY, (rows,))
    heads = _leaf(rows, HEADS, HEAD_DIM, dtype=dtype)
    position = torch.arange(rows) % SEQUENCE
    inv_freq = numerics.rotary_inv_freq(10000.0, HEAD_DIM)
    yield (
        "rms_norm",
        lambda: numerics.rms_norm(x, norm, 1e-5),
        lambda: _stock_rms_norm(x, norm),
        True,
    )
    yield (
        "silu_mul",
        lambda: numerics.silu_mul(gate, up),
        lambda: F.silu(gate) * up,
        True,
    )
    yield (
        "rotary",
        lambda: numerics.rotary(heads, position, inv_freq),
        lambda: _stock_rotary(heads, position, inv_freq),
        True,
    )
    yield (
        "embedding",
        lambda: numerics.embedding(ids, table),
        lambda: F.embedding(ids, table),
        True,
    )
    rows_of_head = min(rows, 256)
    hidden, chosen = _leaf(rows_of_head, HIDDEN, dtype=dtype), ids[:rows_of_head]
    yield (
        f"head_logprobs, {rows_of_head} rows",
        lambda: sum(numerics.head_logprobs(hidden, table, chosen, temperature=1.0)),
        lambda: _stock_head(hidden, table, chosen),
        True,
    )


def _attention_cases(rows: int, dtype: torch.dtype) -> Iterator[Case]:
    q, k, v = (_leaf(rows, h, HEAD_DIM, dtype=dtype) for h in (HEADS, KEY_HEADS, KEY_HEADS))
    starts = tuple(range(0, rows, SEQUENCE))
    lengths = (SEQUENCE,) * len(starts)
    scale = HEAD_DIM**-0.5
    yield (
        f"causal_attention, {len(starts)} x {SEQUENCE}",
        lambda: numerics.causal_attention(q, k, v, starts=starts, lengths=lengths, scale=scale),
        lambda: _stock_attention(q, k, v),
        True,
    )
    blocks = -(-DECODE_LENGTH // 64)
    pages = torch.randn(DECODE_REQUESTS * blocks, KEY_HEADS, 64, HEAD_DIM).to(dtype)
    pages_table = torch.arange(DECODE_REQUESTS * blocks).view(DECODE_REQUESTS, blocks)
    query = torch.randn(DECODE_REQUESTS, HEADS, HEAD_DIM).to(dtype)
    dense = pages.view(DECODE_REQUESTS, blocks, KEY_HEADS, 64, HEAD_DIM).transpose(1, 2)
    dense = dense.flatten(2, 3)[:, :, :DECODE_LENGTH].contiguous()
    yield (
        f"paged_attention_batch, {DECODE_REQUESTS} x {DECODE_LENGTH}",
        lambda: numerics.paged_attention_batch(
            query,
            pages,
            pages,
            pages_table,
            query_lengths=(1,) * DECODE_REQUESTS,
            lengths=(DECODE_LENGTH,) * DECODE_REQUESTS,
            scale=scale,
        ),
        lambda: F.scaled_dot_product_attention(query[:, :, None], dense, dense, enable_gqa=True),
        False,
    )


def _optimizer_cases() -> Iterator[Case]:
    parameter = torch.randn(VOCABULARY // 8, HIDDEN).requires_grad_()
    parameter.grad = torch.randn_like(parameter)
    stock = torch.optim.AdamW([parameter], foreach=False)
    moments = [torch.zeros_like(parameter) for _ in range(2)]
    data, gradient = parameter.detach(), parameter.grad
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    yield (
        "adamw_step_",
        lambda: numerics.adamw_step_(data, gradient, *moments, step=1, **options),
        stock.step,
        False,
    )
    yield (
        "row_square_sums",
        lambda: numerics.ordered_sum(numerics.row_square_sums(gradient)),
        lambda: gradient.double().square().sum(),
        False,
    )


def _best_ms(call: Callable[[], object], repeats: int, *, backward: bool) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        if backward:
            result = call()
            assert isinstance(result, torch.Tensor)
            result.backward(torch.ones_like(result))
        else:
            with torch.no_grad():
                call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times[1:])


def main() -> None:
    """Print one line an op, dtype and direction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024, help="a multiple of 256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="run ops whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'op':34} {'dtype':9} {'pass':8} {'ours ms':>9} {'torch ms':>9} {'ratio':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        for family in (_matrix_cases, _row_cases, _attention_cases):
            _report(family(options.rows, dtype), dtype, options)
    _report(_optimizer_cases(), torch.float32, options)


def _report(cases: Iterator[Case], dtype: torch.dtype, options: argparse.Namespace) -> None:
    for name, ours, stock, has_backward in cases:
        if options.only not in name:
            continue
        for backward in (False, True) if has_backward else (False,):
            mine = _best_ms(ours, options.repeats, backward=backward)
            theirs = _best_ms(stock, options.repeats, backward=backward)
            print(
                f"{name:34} {str(dtype)[6:]:9} {'both' if backward else 'forward':8} "
                f"{mine:9.2f} {theirs:9.2f} {mine / theirs:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
