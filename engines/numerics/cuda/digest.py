"""Partial sums of the tensor digest on the device (`engines.provenance.digest` defines them).

Integer sums modulo 2^64 have no order: a program adds its part, and the parts are added afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_ROUNDS = 16


@triton.jit(do_not_specialize=["numel", "columns", "first_index", "index_step"])
def _digest_kernel(
    words_ptr, sums_ptr, numel, columns, row_stride, first_index, index_step,
    MASK: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    sum_a = tl.zeros([BLOCK], tl.uint64)
    sum_b = tl.zeros([BLOCK], tl.uint64)
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    for turn in range(0, ROUNDS):
        element = base + turn * BLOCK + tl.arange(0, BLOCK)
        inside = element < numel
        row, column = element // columns, element % columns
        word = tl.load(words_ptr + row * row_stride + column, mask=inside, other=0)
        word = word.to(tl.int64).to(tl.uint64, bitcast=True) & MASK
        index = (first_index + row * index_step + column).to(tl.uint64, bitcast=True)
        z = (index << 32) | word
        a = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        a = (a ^ (a >> 27)) * 0x94D049BB133111EB
        sum_a += tl.where(inside, a ^ (a >> 31), 0)
        b = (z ^ (z >> 33)) * 0xFF51AFD7ED558CCD
        b = (b ^ (b >> 33)) * 0xC4CEB9FE1A85EC53
        sum_b += tl.where(inside, b ^ (b >> 33), 0)
    tl.store(sums_ptr + tl.program_id(0) * 2, tl.sum(sum_a, axis=0).to(tl.int64, bitcast=True))
    tl.store(sums_ptr + tl.program_id(0) * 2 + 1, tl.sum(sum_b, axis=0).to(tl.int64, bitcast=True))


@torch.no_grad()
def digest_sums(words: torch.Tensor, *, first_index: int, index_step: int) -> tuple[int, int]:
    """Return both sums over a block of 32-bit words, each in [0, 2^64).

    Args:
        words: integer matrix of 1, 2 or 4 bytes an element, rows at any stride; each element is
            zero-extended to a word.
        first_index: index of the block's first word in the whole tensor.
        index_step: distance of the indices of two words below each other.
    """
    if words.stride(1) != 1 and words.shape[1] > 1:
        words = words.contiguous()
    numel = words.numel()
    if not numel:
        return 0, 0
    programs = triton.cdiv(numel, _BLOCK * _ROUNDS)
    sums = torch.empty(programs, 2, dtype=torch.int64, device=words.device)
    _digest_kernel[(programs,)](
        words, sums, numel, words.shape[1], words.stride(0), first_index, index_step,
        MASK=(1 << (8 * words.element_size())) - 1, BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=4,
    )  # fmt: skip
    sum_a, sum_b = (value % (1 << 64) for value in sums.sum(0).tolist())
    return sum_a, sum_b
