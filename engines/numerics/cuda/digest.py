"""Partial sums of the tensor digest on the device (`engines.provenance.digest` defines them).

Integer sums modulo 2^64 have no order: a program adds its part, and the parts are added afterwards.
Any number of blocks with words of one size takes two launches, one copy to the device and one back:
thousands of small tensors would otherwise each wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engines.numerics.cuda.groups import owner_of
from engines.numerics.cuda.tables import all_aligned, table_of

_BLOCK = 1024
_ROUNDS = 16
_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FIELDS = tl.constexpr(6)


@triton.jit
def _mixed(word, index, inside):
    z = (index.to(tl.uint64, bitcast=True) << 32) | word.to(tl.uint64)
    a = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    a = (a ^ (a >> 27)) * 0x94D049BB133111EB
    b = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCD
    b = (b ^ (b >> 33)) * 0xC4CEB9FE1A85EC53
    return tl.where(inside, a ^ (a >> 31), 0), tl.where(inside, b ^ (b >> 33), 0)


@triton.jit(do_not_specialize=["blocks"])
def _digest_kernel(
    table_ptr, first_ptr, sums_ptr, blocks,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = owner_of(program, first_ptr, blocks)
    row = table_ptr + block.to(tl.int64) * _FIELDS
    words_ptr = tl.load(row).to(tl.pointer_type(WORD))
    if ALIGNED:
        words_ptr = tl.multiple_of(words_ptr, 16)
    numel, columns, row_stride = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    first_index, index_step = tl.load(row + 4), tl.load(row + 5)
    base = (program - tl.load(first_ptr + block)).to(tl.int64) * (BLOCK * ROUNDS)
    sum_a = tl.zeros([BLOCK], tl.uint64)
    sum_b = tl.zeros([BLOCK], tl.uint64)
    if (row_stride == columns) & (index_step == columns):  # one run of words: no division
        for turn in range(0, ROUNDS):
            element = base + turn * BLOCK + tl.arange(0, BLOCK)
            inside = element < numel
            word = tl.load(words_ptr + element, mask=inside, other=0)
            a, b = _mixed(word, first_index + element, inside)
            sum_a += a
            sum_b += b
    else:
        for turn in range(0, ROUNDS):
            element = base + turn * BLOCK + tl.arange(0, BLOCK)
            inside = element < numel
            line, column = element // columns, element % columns
            word = tl.load(words_ptr + line * row_stride + column, mask=inside, other=0)
            a, b = _mixed(word, first_index + line * index_step + column, inside)
            sum_a += a
            sum_b += b
    place = sums_ptr + program.to(tl.int64) * 2
    tl.store(place, tl.sum(sum_a, axis=0).to(tl.int64, bitcast=True))
    tl.store(place + 1, tl.sum(sum_b, axis=0).to(tl.int64, bitcast=True))


@triton.jit
def _add_kernel(sums_ptr, first_ptr, out_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    begin, end = tl.load(first_ptr + block), tl.load(first_ptr + block + 1)
    sum_a = tl.zeros([BLOCK], tl.int64)
    sum_b = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        program = start + tl.arange(0, BLOCK)
        place = sums_ptr + program.to(tl.int64) * 2
        sum_a += tl.load(place, mask=program < end, other=0)
        sum_b += tl.load(place + 1, mask=program < end, other=0)
    tl.store(out_ptr + block * 2, tl.sum(sum_a, axis=0))
    tl.store(out_ptr + block * 2 + 1, tl.sum(sum_b, axis=0))


@dataclass(frozen=True, slots=True)
class WordBlock:
    """A block of words of one tensor."""

    words: torch.Tensor
    """Integer matrix of 1, 2 or 4 bytes an element, rows at any stride; each element is
    zero-extended to a 32-bit word."""
    first_index: int
    """Index of the block's first word in the whole tensor."""
    index_step: int
    """Distance of the indices of two words below each other."""


@torch.no_grad()
def digest_sums(blocks: Sequence[WordBlock]) -> list[tuple[int, int]]:
    """Return both sums over each block, each in [0, 2^64), in the order given.

    Args:
        blocks: on one device; any number, of any word size.
    """
    results = [(0, 0)] * len(blocks)
    for size in sorted({block.words.element_size() for block in blocks}):
        chosen = [
            (index, block)
            for index, block in enumerate(blocks)
            if block.words.element_size() == size and block.words.numel()
        ]
        if chosen:
            indices, same = zip(*chosen, strict=True)
            for index, sums in zip(indices, _sums_of(same, _WORDS[size]), strict=True):
                results[index] = sums
    return results


def _sums_of(blocks: Sequence[WordBlock], word: tl.dtype) -> list[tuple[int, int]]:
    """Return the sums of blocks with one size of word, none of them empty."""
    matrices = [
        block.words
        if block.words.stride(1) == 1 or block.words.shape[1] == 1
        else block.words.contiguous()
        for block in blocks
    ]
    rows = [
        [
            matrix.data_ptr(), matrix.numel(), matrix.shape[1], matrix.stride(0),
            block.first_index, block.index_step,
        ]
        for matrix, block in zip(matrices, blocks, strict=True)
    ]  # fmt: skip
    device = matrices[0].device
    programs = [triton.cdiv(matrix.numel(), _BLOCK * _ROUNDS) for matrix in matrices]
    table = table_of(rows, programs, device)
    sums = torch.empty(table.programs, 2, dtype=torch.int64, device=device)
    _digest_kernel[(table.programs,)](
        table.rows, table.first, sums, len(blocks), WORD=word, ALIGNED=all_aligned(matrices),
        BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=4,
    )  # fmt: skip
    totals = torch.empty(len(blocks), 2, dtype=torch.int64, device=device)
    _add_kernel[(len(blocks),)](sums, table.first, totals, BLOCK=_BLOCK, num_warps=4)
    return [(a % (1 << 64), b % (1 << 64)) for a, b in totals.tolist()]
