"""Causal attention: one blockwise definition for training, prefill, chunk and decode.

A query row meets the key blocks of 64 positions in order, with the running maximum, sum and
weighted values of an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), all in
float32, rounded once at the end. What a row gets depends on its position and on the keys up to it,
never on what it is batched with: a block that a row cannot see multiplies by one and adds zero, and
a row's bits in a product do not depend on the tile's other rows as long as their number is a
multiple of 16.

Backward recomputes the weights block by block from the saved log of the sum. The gradient of a
query adds key blocks in order; the gradient of a key block adds query tiles from the last to the
first, each tile being one product over its 64 positions and all heads of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from engines.numerics.attention_tiles import (
    KEY_BLOCK,
    PackedLayout,
    TilePlan,
    gather_blocks,
    gather_tiles,
    packed_layout,
    plan_tiles,
    requests_of_batch,
    scatter_blocks,
    scatter_tiles,
    take_block,
    with_zero_row,
)
from engines.numerics.blocks import pad_rows


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
        q: `[M, Hq, D]`.
        k: `[M, Hkv, D]`; Hkv divides Hq, and query head h uses key head `h // (Hq / Hkv)`.
        v: `[M, Hkv, D]`.
        starts: first row of each sequence, ascending.
        lengths: rows of each sequence; row `start + p` has position p.
        scale: multiplies the query in float32.

    Returns:
        `[M, Hq, D]`, dtype of `q`; rows of no sequence are zero, as are their gradients.

    Raises:
        ValueError: Sequences overlap, are out of order, or leave the rows.
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
        scale: multiplies the query in float32.

    Returns:
        `[T, Hq, D]`, the bits of `causal_attention` over the whole sequence.
    """
    if query_start + q.shape[0] != keys.shape[0]:
        raise ValueError(
            f"paged_attention: queries end at position {query_start + q.shape[0]}, keys at "
            f"{keys.shape[0]}; pass the keys up to the last query"
        )
    key_pages, value_pages = (
        pad_rows(t, KEY_BLOCK).unflatten(0, (-1, KEY_BLOCK)).transpose(1, 2) for t in (keys, values)
    )
    return paged_attention_batch(
        q,
        key_pages,
        value_pages,
        torch.arange(key_pages.shape[0])[None],
        query_lengths=(q.shape[0],),
        lengths=(keys.shape[0],),
        scale=scale,
    )


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
        key_pages: `[pages, Hkv, page size, D]`, any strides; the page size divides 64 or is a
            multiple.
        value_pages: like `key_pages`.
        page_table: integer `[requests, pages]`; entries past a request's length are ignored, and
            must name some page.
        query_lengths: query rows of each request, its last positions; they add up to at most T.
        lengths: positions of each request that are in the cache, queries included.
        scale: multiplies the query in float32.

    Returns:
        `[T, Hq, D]`, dtype of `q`; each request's rows have the bits of `paged_attention` on it
        alone. Rows of no request are zero.
    """
    page = key_pages.shape[2]
    if KEY_BLOCK % page and page % KEY_BLOCK:
        raise ValueError(
            f"paged_attention_batch: a page of {page} positions neither divides {KEY_BLOCK} nor is "
            "a multiple of it; choose another block size"
        )
    table = F.pad(page_table.long(), (0, -page_table.shape[1] % max(1, KEY_BLOCK // page)))
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    padded = with_zero_row(q)
    group = q.shape[1] // key_pages.shape[1]
    requests = requests_of_batch(query_lengths, lengths)
    # Single rows have tiles of their own, so that decoding does not pay for 64 positions.
    decoding = tuple(request for request in requests if request.queries == 1)
    others = tuple(request for request in requests if request.queries > 1)
    for width, chosen in ((1, decoding), (KEY_BLOCK, others)):
        if chosen:
            plan = plan_tiles(chosen, num_rows=q.shape[0], width=width, group=group)
            tiles = gather_tiles(padded, plan).mul_(scale)
            result, _ = _attend(tiles, key_pages, value_pages, table[plan.request], plan)
            scatter_tiles(out, result, plan)
    return out


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply `[tiles, Hkv, n, k]` by `[tiles, Hkv, k, m]`."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _scores(tiles: torch.Tensor, keys: torch.Tensor, plan: TilePlan, block: int) -> torch.Tensor:
    """Return masked scores against one block, `[active tiles, Hkv, tile rows, 64]`."""
    active = plan.active[block]
    scores = _bmm(tiles[:active], keys.transpose(2, 3))
    # At most 64 positions wide, a tile can only be cut by the last two blocks that it meets.
    first_cut = plan.active_at(block + 2)
    columns = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
    hidden = columns > plan.position[first_cut:active, None, :, None]
    scores[first_cut:].masked_fill_(hidden, float("-inf"))
    return scores


def _values(pages: torch.Tensor, table: torch.Tensor, plan: TilePlan, block: int) -> torch.Tensor:
    """Return the values of one block, zero past the end: what a page holds there may be NaN."""
    active, last = plan.active[block], plan.active_at(block + 1)
    values = take_block(pages, table[:active], block)
    columns = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
    past_end = columns >= plan.length[last:active, None]
    values[last:].masked_fill_(past_end[:, None, :, None], 0.0)
    return values


def _attend(
    tiles: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    table: torch.Tensor,
    plan: TilePlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[tiles, Hkv, tile rows, D]` and logs of sums `[..., 1]`, float32."""
    maximum = tiles.new_full((*tiles.shape[:3], 1), float("-inf"))
    total = torch.zeros_like(maximum)
    out = torch.zeros_like(tiles)
    for block, active in enumerate(plan.active):
        scores = _scores(tiles, take_block(key_pages, table[:active], block), plan, block)
        raised = torch.maximum(maximum[:active], scores.amax(-1, keepdim=True))
        weights = scores.sub_(raised).exp_()
        decay = maximum[:active].sub_(raised).exp_()
        total[:active].mul_(decay).add_(weights.sum(-1, keepdim=True))
        out[:active].mul_(decay).add_(_bmm(weights, _values(value_pages, table, plan, block)))
        maximum[:active] = raised
    # Adding zero makes -0 into +0: whether a row met a block that it cannot see must not show.
    return out.div_(total).add_(0.0), total.log_().add_(maximum)


def _attend_backward(
    tiles: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PackedLayout,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return float32 gradients of tiles, key blocks and value blocks.

    Source: Dao et al., 2022, algorithm 4.
    """
    plan, table = layout.plan, layout.table
    of_tiles, of_keys, of_values = (torch.zeros_like(t) for t in (tiles, keys, values))
    projection = (gradient * out).sum(-1, keepdim=True)
    for block, active in enumerate(plan.active):
        chosen = table[:active, block]
        block_keys, block_values = keys[chosen], values[chosen]
        weights = _scores(tiles, block_keys, plan, block).sub_(log_sum[:active]).exp_()
        # On the CPU index_add_ is a serial loop, so tiles are added in their order in the plan.
        of_values.index_add_(0, chosen, _bmm(weights.transpose(2, 3), gradient[:active]))
        of_scores = (
            _bmm(gradient[:active], block_values.transpose(2, 3))
            .sub_(projection[:active])
            .mul_(weights)
        )
        of_keys.index_add_(0, chosen, _bmm(of_scores.transpose(2, 3), tiles[:active]))
        of_tiles[:active] += _bmm(of_scores, block_keys)
    return of_tiles, of_keys, of_values


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
        layout = packed_layout(starts, lengths, num_rows=q.shape[0], group=q.shape[1] // k.shape[1])
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        log_sum = None
        if layout is not None:
            tiles = gather_tiles(with_zero_row(q), layout.plan).mul_(scale)
            keys, values = (gather_blocks(t, layout.block_rows) for t in (k, v))
            result, log_sum = _attend(tiles, keys, values, layout.table, layout.plan)
            scatter_tiles(out, result, layout.plan)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        layout: PackedLayout | None = ctx.layout
        of_q, of_k, of_v = (
            torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)
        )
        if layout is not None:
            tiles = gather_tiles(with_zero_row(q), layout.plan).mul_(ctx.scale)
            keys, values = (gather_blocks(t, layout.block_rows) for t in (k, v))
            out_tiles, upstream = (
                gather_tiles(with_zero_row(t), layout.plan) for t in (out, gradient)
            )
            of_tiles, of_keys, of_values = _attend_backward(
                tiles, keys, values, layout, log_sum, out_tiles, upstream
            )
            scatter_tiles(of_q, of_tiles.mul_(ctx.scale), layout.plan)
            scatter_blocks(of_k, of_keys, layout.block_rows)
            scatter_blocks(of_v, of_values, layout.block_rows)
        return of_q, of_k, of_v, None, None, None
