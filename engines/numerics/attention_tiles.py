"""How attention is cut: query tiles, key blocks, and which tile meets which block.

A tile holds up to 64 consecutive positions of one request, for all query heads that share a key
head; its rows are padded to a multiple of 16. A key block holds 64 positions counted from position
0. Tiles that meet most blocks come first, so that those which meet a given block are always the
first few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engines.numerics.blocks import ROW_TILE
from engines.numerics.spans import check_spans

KEY_BLOCK = 64
"""Positions of a key block; also the most positions of a query tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Consecutive query rows that are the last positions of one sequence."""

    index: int
    """Row of the page table."""
    row: int
    """First query row."""
    queries: int
    length: int
    """Positions of the sequence so far, queries included."""

    def __post_init__(self) -> None:
        if not 0 <= self.queries <= self.length:
            raise ValueError(
                f"attention: request {self.index} has {self.queries} query rows but "
                f"{self.length} positions; keys of the queries themselves must be there"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Where each row of each tile comes from."""

    rows: torch.Tensor
    """int64 `[tiles, positions]`: query row, or the number of rows (a zero row) past the end."""
    position: torch.Tensor
    """int64 `[tiles, tile rows]`: heads of a group times positions, padded to a multiple of 16."""
    length: torch.Tensor
    """int64 `[tiles]`: positions of the tile's request."""
    request: torch.Tensor
    """int64 `[tiles]`: row of the page table."""
    group: int
    """Query heads that share a key head."""
    active: tuple[int, ...]
    """For each key block, how many of the first tiles meet it."""

    def active_at(self, block: int) -> int:
        """Return how many tiles meet a block, zero past the last one."""
        return self.active[block] if block < len(self.active) else 0


@functools.lru_cache(maxsize=16)
def plan_tiles(requests: tuple[Request, ...], *, num_rows: int, width: int, group: int) -> TilePlan:
    """Cut requests into tiles of `width` positions (at least one request with a row).

    A pure function of integers, kept because every layer of a model asks for the same plan.
    """
    tiles = [
        (
            (request.length - request.queries + min(offset + width, request.queries) - 1)
            // KEY_BLOCK
            + 1,
            request.index,
            request.row + offset,
            request.length - request.queries + offset,
            min(width, request.queries - offset),
            request.length,
        )
        for request in requests
        for offset in range(0, request.queries, width)
    ]
    tiles.sort(key=lambda tile: -tile[0])
    blocks, index, row, position, count, length = torch.tensor(tiles).unbind(1)
    step = torch.arange(width)
    # A row past the end sees what the last position sees: it is thrown away but must stay finite.
    positions = torch.minimum(position[:, None] + step, length[:, None] - 1).repeat(1, group)
    return TilePlan(
        rows=torch.where(step < count[:, None], row[:, None] + step, num_rows),
        position=F.pad(positions, (0, -positions.shape[1] % ROW_TILE)),
        length=length,
        request=index,
        group=group,
        active=tuple(int((blocks > block).sum()) for block in range(int(blocks.max()))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Tiles of packed sequences, and their own rows laid out as key blocks."""

    plan: TilePlan
    block_rows: torch.Tensor
    """int64 `[blocks, 64]`: row of each position, or the number of rows (a zero row)."""
    table: torch.Tensor
    """int64 `[tiles, blocks of the longest sequence]`: key blocks of each tile."""


@functools.lru_cache(maxsize=16)
def packed_layout(
    starts: tuple[int, ...], lengths: tuple[int, ...], *, num_rows: int, group: int
) -> PackedLayout | None:
    """Lay out sequences that occupy rows `[start, start + length)`; None if all are empty.

    Raises:
        ValueError: See `engines.numerics.spans.check_spans`.
    """
    check_spans(starts, lengths, num_rows=num_rows)
    requests = tuple(
        Request(index=index, row=start, queries=length, length=length)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
    )
    counts = torch.tensor([-(-length // KEY_BLOCK) for length in lengths], dtype=torch.int64)
    if not counts.sum():
        return None
    sequence = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    offset = (torch.arange(len(sequence)) - first[sequence])[:, None] * KEY_BLOCK + torch.arange(
        KEY_BLOCK
    )
    rows = torch.where(
        offset < torch.tensor(lengths)[sequence, None],
        torch.tensor(starts)[sequence, None] + offset,
        num_rows,
    )
    plan = plan_tiles(requests, num_rows=num_rows, width=KEY_BLOCK, group=group)
    blocks = first[:, None] + torch.arange(int(counts.max()))
    return PackedLayout(
        plan=plan, block_rows=rows, table=blocks.clamp(max=len(sequence) - 1)[plan.request]
    )


def with_zero_row(x: torch.Tensor) -> torch.Tensor:
    """Append the zero row that absent rows point at."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))


def gather_tiles(padded: torch.Tensor, plan: TilePlan) -> torch.Tensor:
    """Gather `[rows + 1, Hq, D]` into contiguous float32 tiles `[tiles, Hkv, tile rows, D]`."""
    tiles = padded[plan.rows].unflatten(2, (-1, plan.group)).permute(0, 2, 3, 1, 4).float()
    tiles = tiles.flatten(2, 3).contiguous()
    missing = plan.position.shape[1] - tiles.shape[2]
    return F.pad(tiles, (0, 0, 0, missing)) if missing else tiles


def scatter_tiles(out: torch.Tensor, tiles: torch.Tensor, plan: TilePlan) -> None:
    """Write tiles to their rows of `out`, rounding to its dtype."""
    width = plan.rows.shape[1]
    rows = tiles[:, :, : plan.group * width].unflatten(2, (plan.group, width))
    present = plan.rows < out.shape[0]
    out[plan.rows[present]] = rows.permute(0, 3, 1, 2, 4).flatten(2, 3)[present].to(out.dtype)


def gather_blocks(x: torch.Tensor, block_rows: torch.Tensor) -> torch.Tensor:
    """Gather `[rows, Hkv, D]` into contiguous float32 key blocks `[blocks, Hkv, 64, D]`."""
    return with_zero_row(x)[block_rows].transpose(1, 2).float().contiguous()


def scatter_blocks(out: torch.Tensor, blocks: torch.Tensor, block_rows: torch.Tensor) -> None:
    """Write key blocks to their rows of `out`, rounding to its dtype."""
    present = block_rows < out.shape[0]
    out[block_rows[present]] = blocks.transpose(1, 2)[present].to(out.dtype)


def take_block(pages: torch.Tensor, table: torch.Tensor, block: int) -> torch.Tensor:
    """Copy one key block of each tile out of pages `[pages, Hkv, page size, D]`.

    Returns:
        float32 `[tiles, Hkv, 64, D]`, contiguous and never an alias of the pages.
    """
    page = pages.shape[2]
    if page >= KEY_BLOCK:
        page_index, part = divmod(block * KEY_BLOCK, page)
        return pages[:, :, part : part + KEY_BLOCK].index_select(0, table[:, page_index]).float()
    per_block = KEY_BLOCK // page
    chosen = table[:, block * per_block : (block + 1) * per_block]
    return pages[chosen].transpose(1, 2).flatten(2, 3).float().contiguous()


def requests_of_batch(query_lengths: Sequence[int], lengths: Sequence[int]) -> tuple[Request, ...]:
    """Return the requests of query rows that lie one request after the other."""
    requests, row = [], 0
    for index, (queries, length) in enumerate(zip(query_lengths, lengths, strict=True)):
        requests.append(Request(index=index, row=row, queries=queries, length=length))
        row += queries
    return tuple(requests)
