"""The kernels of a mixture of experts; `engines.numerics.cuda.experts` says which orders they keep.

A row's way through one expert is a *place*. Places are sorted by expert, within an expert by row:
expert e has places `first[e] ... first[e + 1] - 1`. No kernel splits a sum, none uses atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engines.numerics.cuda.groups import group_of_tile


@triton.jit(do_not_specialize=["experts"])
def expert_matmul_kernel(
    x_ptr, weight_ptr, out_ptr, first_ptr, source_ptr, target_ptr, experts, n, k, x_row,
    weight_expert, weight_k, weight_column, out_row,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's places by its matrix; `k` in steps, in order.

    Place p is read from row `source[p]` (`GATHER`) and written to row `target[p]` (`SCATTER`), else
    from and to row p.
    """
    tile = tl.program_id(0)
    expert = group_of_tile(tile, first_ptr, experts, BLOCK_M)
    first = tl.load(first_ptr + expert)
    last = tl.load(first_ptr + expert + 1)
    begin = first + (tile - (first // BLOCK_M + expert)) * BLOCK_M
    if begin >= last:
        return
    place = begin + tl.arange(0, BLOCK_M)
    present = place < last
    source = place.to(tl.int64)
    if GATHER:
        source = tl.load(source_ptr + place, mask=present, other=0).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    matrix_ptr = weight_ptr + expert.to(tl.int64) * weight_expert
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        index = start + inner
        x = tl.load(
            x_ptr + source[:, None] * x_row + index[None, :],
            mask=present[:, None] & (index < k)[None, :], other=0.0,
        )  # fmt: skip
        weight = tl.load(
            matrix_ptr + index[:, None] * weight_k + column[None, :] * weight_column,
            mask=(index < k)[:, None] & (column < n)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    target = place.to(tl.int64)
    if SCATTER:
        target = tl.load(target_ptr + place, mask=present, other=0).to(tl.int64)
    tl.store(
        out_ptr + target[:, None] * out_row + column[None, :], total.to(out_ptr.dtype.element_ty),
        mask=present[:, None] & (column < n)[None, :],
    )  # fmt: skip


@triton.jit
def expert_weight_gradient_kernel(
    gradient_ptr, x_ptr, total_ptr, place_ptr, chunk_ptr, gradient_index_ptr, x_index_ptr, n, k,
    gradient_row, x_row,
    GATHER_GRADIENT: tl.constexpr, GATHER_X: tl.constexpr, FRESH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add `gradient.T @ x` over one expert's places to `total`, chunk by chunk.

    Expert e has chunks `chunk[e] ... chunk[e + 1] - 1`; chunk c has the places `place[c * ROWS]`
    and on, of which those below zero are empty.
    """
    expert = tl.program_id(0)
    output = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = (tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
    cell = total_ptr + expert.to(tl.int64) * n * k + output[:, None] * k + inner[None, :]
    inside = (output < n)[:, None] & (inner < k)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if not FRESH:
        total = tl.load(cell, mask=inside, other=0.0)
    for chunk in range(tl.load(chunk_ptr + expert), tl.load(chunk_ptr + expert + 1)):
        place = tl.load(place_ptr + chunk * ROWS + tl.arange(0, ROWS))
        present = place >= 0
        left, right = place.to(tl.int64), place.to(tl.int64)
        if GATHER_GRADIENT:
            left = tl.load(gradient_index_ptr + place, mask=present, other=0).to(tl.int64)
        if GATHER_X:
            right = tl.load(x_index_ptr + place, mask=present, other=0).to(tl.int64)
        gradient = tl.load(
            gradient_ptr + left[None, :] * gradient_row + output[:, None],
            mask=present[None, :] & (output < n)[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + right[:, None] * x_row + inner[None, :],
            mask=present[:, None] & (inner < k)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(gradient, x, total, input_precision=PRECISION)
    tl.store(cell, total, mask=inside)


@triton.jit(do_not_specialize=["columns"])
def combine_kernel(
    part_ptr, weight_ptr, out_ptr, columns,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of a row, weighted or as they are, in float32, first slot to last."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        place = row * SLOTS + slot
        part = tl.load(part_ptr + place * columns + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weight_ptr + place)
        total = part if slot == 0 else total + part
    tl.store(out_ptr + row * columns + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["columns"])
def spread_kernel(
    gradient_ptr, part_ptr, weight_ptr, of_part_ptr, of_weight_ptr, columns,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of a weighted sum: of part s `g * weight`, of its weight `sum(g * part)`."""
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = row * SLOTS + slot
    gradient = tl.load(gradient_ptr + row * columns + column, mask=inside, other=0.0)
    gradient = gradient.to(tl.float32)
    part = tl.load(part_ptr + place * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(of_weight_ptr + place, tl.sum(gradient * part, axis=0))
    of_part = gradient * tl.load(weight_ptr + place)
    tl.store(
        of_part_ptr + place * columns + column, of_part.to(of_part_ptr.dtype.element_ty),
        mask=inside,
    )  # fmt: skip
