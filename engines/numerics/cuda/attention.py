"""Causal attention on the device: one kernel for training, prefill, chunk and decode.

What a row gets depends on its position and on the keys up to it, never on the page size, on what
it is batched with, or on how many rows of its request came with it. The backward adds key blocks
and query tiles in fixed orders, without atomics (`engines.numerics.cuda.attention_kernels`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import pad_rows
from engines.numerics.cuda import attention_kernels
from engines.numerics.cuda.attention_kernels import (
    attention_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
    row_product_kernel,
)
from engines.numerics.cuda.layout import aligned, power_of_two, row_major
from engines.numerics.spans import check_spans

KEY_BLOCK: int = attention_kernels.KEY_BLOCK.value
"""Positions of a key block."""
TILE_ROWS = 16
"""Rows of a query tile of the forward: positions times the query heads of one key head."""
_WARPS = 4
_STAGES = 3


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    starts: Sequence[int],
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend within each of several sequences packed into one row dimension.

    Args:
        q: `[M, Hq, D]`, float32 or bfloat16.
        k: `[M, Hkv, D]`; Hkv divides Hq, and query head h uses key head `h // (Hq / Hkv)`.
        v: `[M, Hkv, D]`.
        starts: first row of each sequence, ascending.
        lengths: rows of each sequence; row `start + p` has position p.
        scale: multiplies the scores in float32.

    Returns:
        `[M, Hq, D]`, dtype of `q`; rows of no sequence are zero, as are their gradients.
    """
    return _CausalAttention.apply(q, k, v, tuple(starts), tuple(lengths), scale)  # type: ignore[no-any-return]


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, query_start: int, scale: float
) -> torch.Tensor:
    """Attend from some rows of one request to all its keys so far; no gradient.

    Args:
        q: `[T, Hq, D]`, rows at positions `query_start ... query_start + T - 1`.
        keys: `[S, Hkv, D]`, positions `0 ... S - 1`, with `S = query_start + T`.
        values: `[S, Hkv, D]`.
        query_start: position of the first query.
        scale: multiplies the scores in float32.
    """
    if query_start + q.shape[0] != keys.shape[0]:
        raise ValueError(
            f"paged_attention: queries end at position {query_start + q.shape[0]}, keys at "
            f"{keys.shape[0]}; pass the keys up to the last query"
        )
    key_pages, value_pages = (
        pad_rows(t, KEY_BLOCK).unflatten(0, (-1, KEY_BLOCK)).transpose(1, 2) for t in (keys, values)
    )
    table = torch.arange(key_pages.shape[0], dtype=torch.int32, device=q.device)[None]
    return paged_attention_batch(
        q, key_pages, value_pages, table,
        query_lengths=(q.shape[0],), lengths=(keys.shape[0],), scale=scale,
    )  # fmt: skip


@torch.no_grad()
def paged_attention_batch(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attend for many requests at once, straight from a paged cache; no gradient.

    Args:
        q: `[T, Hq, D]`, the query rows of all requests one after the other.
        key_pages: `[pages, Hkv, page size, D]`, any strides but of the last dimension.
        value_pages: like `key_pages`.
        page_table: integer `[requests, pages]`; entries past a request's length are not read.
        query_lengths: query rows of each request, its last positions; they add up to at most T.
        lengths: positions of each request that are in the cache, queries included.
        scale: multiplies the scores in float32.

    Returns:
        `[T, Hq, D]`, dtype of `q`; rows of no request are zero.
    """
    counts = torch.tensor([0, *query_lengths], dtype=torch.int32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    attend_pages(
        q, key_pages, value_pages, page_table.to(torch.int32).contiguous(),
        query_starts=counts.cumsum(0, dtype=torch.int32).to(q.device),
        lengths=torch.tensor(tuple(lengths), dtype=torch.int32).to(q.device),
        max_query_length=max(query_lengths, default=0), scale=scale, out=out,
    )  # fmt: skip
    return out


@torch.no_grad()
def attend_pages(
    q: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_query_length: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend from a paged cache with all sizes on the device, so that a graph can capture it.

    Args:
        q: `[T, Hq, D]`.
        key_pages: `[pages, Hkv, page size, D]`, any strides but of the last dimension.
        value_pages: like `key_pages`.
        page_table: int32 `[requests, pages]`.
        query_starts: int32 `[requests + 1]`, first query row of each request, and the end.
        lengths: int32 `[requests]`, positions in the cache; not read where there is no query.
        max_query_length: largest number of queries of a request; 1 selects the grid of decode.
        scale: multiplies the scores in float32.
        out: `[T, Hq, D]`, written in the rows of the queries.
    """
    requests = lengths.shape[0]
    if not requests or not q.shape[0]:
        return
    _launch(
        row_major(q), key_pages, value_pages, out, None, query_starts, query_starts[1:], lengths,
        page_table, requests=requests, page=key_pages.shape[2], scale=scale,
        single=max_query_length <= 1,
        key_strides=(key_pages.stride(0), key_pages.stride(2), key_pages.stride(1)),
        value_strides=(value_pages.stride(0), value_pages.stride(2), value_pages.stride(1)),
    )  # fmt: skip


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    log_sum: torch.Tensor | None, first: torch.Tensor, last: torch.Tensor, lengths: torch.Tensor,
    table: torch.Tensor | None, *, requests: int, page: int, scale: float, single: bool,
    key_strides: tuple[int, int, int], value_strides: tuple[int, int, int],
) -> None:  # fmt: skip
    rows, heads, width = q.shape
    key_heads = k.shape[1]
    group = heads // key_heads
    if group > TILE_ROWS:
        raise ValueError(
            f"attention: {group} query heads share a key head; the kernel's tile has {TILE_ROWS}"
        )
    queries = TILE_ROWS // group
    tiles = requests if single else rows // queries + requests
    attention_kernel[(tiles, key_heads)](
        q, k, v, out, log_sum, first, last, lengths, table, requests, scale,
        q.stride(0), q.stride(1), *key_strides, *value_strides, out.stride(0), out.stride(1),
        *((0, 0) if table is None else (table.stride(0), table.shape[1])), heads,
        GROUP=group, DIM=width, BLOCK_DIM=max(16, power_of_two(width)), ROWS=TILE_ROWS,
        QUERIES=queries, PAGE=page, SINGLE=single, STORE=log_sum is not None, PRECISION="ieee",
        # No contraction: it could differ between the variants that training and decode run.
        num_warps=_WARPS, num_stages=_STAGES, enable_fp_fusion=False,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _packed(
    starts: tuple[int, ...], lengths: tuple[int, ...], num_rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int32 firsts, lasts, lengths and tiles `[tiles, 3]` of packed sequences."""
    check_spans(starts, lengths, num_rows=num_rows)
    spans = [(start, length) for start, length in zip(starts, lengths, strict=True) if length]
    if spans and spans[0][0]:
        spans.insert(0, (0, 0))  # the kernels look for a tile's sequence from row 0 on
    tiles = [
        (start, begin, length) for start, length in spans for begin in range(0, length, KEY_BLOCK)
    ]
    firsts = torch.tensor([start for start, _ in spans], dtype=torch.int32)
    counts = torch.tensor([length for _, length in spans], dtype=torch.int32)
    return (
        firsts.to(device),
        (firsts + counts).to(device),
        counts.to(device),
        torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).to(device),
    )


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        log_sum = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.starts, ctx.lengths, ctx.scale = starts, lengths, scale
        firsts, lasts, counts, _ = _packed(starts, lengths, len(q), q.device)
        if firsts.shape[0]:
            q, k, v = row_major(q), row_major(k), row_major(v)
            _launch(
                q, k, v, out, log_sum, firsts, lasts, counts, None,
                requests=firsts.shape[0], page=0, scale=scale, single=False,
                key_strides=(0, k.stride(0), k.stride(1)),
                value_strides=(0, v.stride(0), v.stride(1)),
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sum = (aligned(saved) for saved in ctx.saved_tensors)
        gradient = aligned(gradient)
        of_q, of_k, of_v = (torch.zeros_like(t) for t in (q, k, v))
        *_, tiles = _packed(ctx.starts, ctx.lengths, len(q), q.device)
        if tiles.shape[0]:
            rows, heads, width = q.shape
            key_heads = k.shape[1]
            shape = {"DIM": width, "BLOCK_DIM": max(16, power_of_two(width))}
            product = torch.empty_like(log_sum)
            row_product_kernel[(triton.cdiv(rows * heads, KEY_BLOCK),)](
                gradient, out, product, rows * heads, ROWS=KEY_BLOCK, num_warps=4, **shape
            )
            group = {"GROUP": heads // key_heads, "PRECISION": "ieee", **shape}
            query_gradient_kernel[(tiles.shape[0], heads)](
                q, k, v, gradient, log_sum, product, of_q, tiles, ctx.scale, heads, key_heads,
                num_warps=4, num_stages=2, **group,
            )  # fmt: skip
            key_gradient_kernel[(tiles.shape[0], key_heads)](
                q, k, v, gradient, log_sum, product, of_k, of_v, tiles, ctx.scale, heads,
                key_heads, num_warps=4, num_stages=2, **group,
            )  # fmt: skip
        return of_q, of_k, of_v, None, None, None
