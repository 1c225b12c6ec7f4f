"""The kernels of attention: one forward for training, prefill, chunk and decode, and its backward.

A query tile of the forward always has the same shape, and meets blocks of 64 keys in order with an
online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022); what differs between callers is
only how a key's address is found. A block that a row cannot see multiplies by one and adds zero.
No kernel splits keys, and none uses atomics. `PAGE` is the page size, or 0 where keys are rows
beside the queries; `SINGLE` says that every request has at most one query, so tile i is request i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engines.numerics.cuda.groups import group_of_tile

KEY_BLOCK = tl.constexpr(64)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _key_places(
    key, first, request, table_ptr, table_stride, table_columns, stored, k_page, k_slot, v_page,
    v_slot, PAGE: tl.constexpr,
):  # fmt: skip
    """Return where keys and values of these positions lie, in a cache or beside the queries."""
    if PAGE:
        page = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + key // PAGE,
            # A dummy batch may claim more positions than its table has pages for.
            mask=stored & (key // PAGE < table_columns), other=0,
        ).to(tl.int64)  # fmt: skip
        k_place = page * k_page + (key % PAGE) * k_slot
        v_place = page * v_page + (key % PAGE) * v_slot
    else:
        k_place = (first + key).to(tl.int64) * k_slot
        v_place = (first + key).to(tl.int64) * v_slot
    return k_place, v_place


@triton.jit
def _finish(
    out, total, maximum, out_ptr, log_sum_ptr, query_row, head, dim, present, out_row, out_head,
    heads, DIM: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, round once and store; the logs of the sums too, for the backward."""
    # Adding zero makes -0 into +0: whether a row met a block that it cannot see must not show.
    out = tl.div_rn(out, total[:, None] + tl.zeros_like(out)) + 0.0
    tl.store(
        out_ptr + query_row[:, None] * out_row + head[:, None] * out_head + dim[None, :],
        out.to(out_ptr.dtype.element_ty), mask=present[:, None] & (dim < DIM)[None, :],
    )  # fmt: skip
    if STORE:
        log_sum = maximum + tl.log2(total) * LN_2
        tl.store(log_sum_ptr + query_row * heads + head, log_sum, mask=present)


@triton.jit(do_not_specialize=["requests", "table_stride", "table_columns"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_sum_ptr, first_ptr, last_ptr, length_ptr, table_ptr,
    requests, scale, q_row, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_row,
    out_head, table_stride, table_columns, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    QUERIES: tl.constexpr, PAGE: tl.constexpr, SINGLE: tl.constexpr, STORE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of `QUERIES` positions of one request, for all heads that share a key head."""
    tile, key_head = tl.program_id(0), tl.program_id(1)
    request = tile if SINGLE else group_of_tile(tile, first_ptr, requests, QUERIES)
    first = tl.load(first_ptr + request)
    queries = tl.load(last_ptr + request) - first
    offset = 0 if SINGLE else (tile - (first // QUERIES + request)) * QUERIES
    if offset >= queries:
        return
    length = tl.load(length_ptr + request)
    row = tl.arange(0, ROWS)
    query = offset + row // GROUP
    present = (row < QUERIES * GROUP) & (query < queries)
    # A row past the end sees what the last one sees: thrown away, but finite.
    position = length - queries + tl.minimum(query, queries - 1)
    head = key_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    query_row = (first + query).to(tl.int64)
    q = tl.load(
        q_ptr + query_row[:, None] * q_row + head[:, None] * q_head + dim[None, :],
        mask=present[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    end = length - queries + tl.minimum(offset + QUERIES, queries)
    for start in range(0, end, KEY_BLOCK):
        key = start + tl.arange(0, KEY_BLOCK)
        stored = key < length
        k_place, v_place = _key_places(
            key, first, request, table_ptr, table_stride, table_columns, stored, k_page, k_slot,
            v_page, v_slot, PAGE,
        )  # fmt: skip
        k = tl.load(
            k_ptr + k_place[None, :] + key_head * k_head + dim[:, None],
            mask=stored[None, :] & (dim < DIM)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        raised = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp2((scores - raised[:, None]) * LOG2_E)
        decay = tl.exp2((maximum - raised) * LOG2_E)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(
            v_ptr + v_place[:, None] + key_head * v_head + dim[None, :],
            mask=stored[:, None] & (dim < DIM)[None, :], other=0.0,
        )  # fmt: skip
        out = out * decay[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        maximum = raised
    _finish(
        out, total, maximum, out_ptr, log_sum_ptr, query_row, head, dim, present, out_row, out_head,
        heads, DIM, STORE,
    )  # fmt: skip


@triton.jit
def row_product_kernel(
    a_ptr, b_ptr, out_ptr, rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Write float32 `sum(a * b)` of each row of two contiguous `[rows, DIM]` matrices."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    dim = tl.arange(0, BLOCK_DIM)
    place = row[:, None] * DIM + dim[None, :]
    inside = (row < rows)[:, None] & (dim < DIM)[None, :]
    a = tl.load(a_ptr + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(a * b, axis=1), mask=row < rows)


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, gradient_ptr, log_sum_ptr, product_ptr, of_q_ptr, tile_ptr, scale,
    heads, key_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of 64 positions and one query head: key blocks in order.

    All matrices are contiguous `[M, heads, DIM]`; a tile is (first row of the sequence, first
    position, positions of the sequence).
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tile_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tile_ptr + tile * 3 + 1)
    length = tl.load(tile_ptr + tile * 3 + 2)
    key_head = head // GROUP
    dim = tl.arange(0, BLOCK_DIM)
    position = begin + tl.arange(0, KEY_BLOCK)
    row = first + position
    present = position < length
    inside = present[:, None] & (dim < DIM)[None, :]
    place = (row * heads + head)[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0)
    log_sum = tl.load(log_sum_ptr + row * heads + head, mask=present, other=0.0)
    product = tl.load(product_ptr + row * heads + head, mask=present, other=0.0)
    of_q = tl.zeros([KEY_BLOCK, BLOCK_DIM], tl.float32)
    for start in range(0, begin + 1, KEY_BLOCK):
        key = start + tl.arange(0, KEY_BLOCK)
        stored = key < length
        key_place = ((first + key) * key_heads + key_head)[:, None] * DIM + dim[None, :]
        key_inside = stored[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_ptr + key_place, mask=key_inside, other=0.0)
        v = tl.load(v_ptr + key_place, mask=key_inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = (key[None, :] <= position[:, None]) & present[:, None]
        weights = tl.where(seen, tl.exp2((scores - log_sum[:, None]) * LOG2_E), 0.0)
        of_weights = tl.dot(gradient, tl.trans(v), input_precision=PRECISION)
        of_scores = weights * (of_weights - product[:, None])
        of_q = tl.dot(of_scores.to(k.dtype), k, of_q, input_precision=PRECISION)
    tl.store(of_q_ptr + place, (of_q * scale).to(of_q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, gradient_ptr, log_sum_ptr, product_ptr, of_k_ptr, of_v_ptr, tile_ptr,
    scale, heads, key_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of 64 keys and one key head: heads in order, query tiles in order."""
    tile, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tile_ptr + tile * 3).to(tl.int64)
    begin = tl.load(tile_ptr + tile * 3 + 1)
    length = tl.load(tile_ptr + tile * 3 + 2)
    dim = tl.arange(0, BLOCK_DIM)
    key = begin + tl.arange(0, KEY_BLOCK)
    stored = key < length
    key_place = ((first + key) * key_heads + key_head)[:, None] * DIM + dim[None, :]
    key_inside = stored[:, None] & (dim < DIM)[None, :]
    k = tl.load(k_ptr + key_place, mask=key_inside, other=0.0)
    v = tl.load(v_ptr + key_place, mask=key_inside, other=0.0)
    of_k = tl.zeros([KEY_BLOCK, BLOCK_DIM], tl.float32)
    of_v = tl.zeros([KEY_BLOCK, BLOCK_DIM], tl.float32)
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        for start in range(begin, length, KEY_BLOCK):
            position = start + tl.arange(0, KEY_BLOCK)
            row = first + position
            present = position < length
            inside = present[:, None] & (dim < DIM)[None, :]
            place = (row * heads + head)[:, None] * DIM + dim[None, :]
            q = tl.load(q_ptr + place, mask=inside, other=0.0)
            gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0)
            log_sum = tl.load(log_sum_ptr + row * heads + head, mask=present, other=0.0)
            product = tl.load(product_ptr + row * heads + head, mask=present, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = (key[None, :] <= position[:, None]) & present[:, None]
            weights = tl.where(seen, tl.exp2((scores - log_sum[:, None]) * LOG2_E), 0.0)
            of_v = tl.dot(tl.trans(weights.to(v.dtype)), gradient, of_v, input_precision=PRECISION)
            of_weights = tl.dot(gradient, tl.trans(v), input_precision=PRECISION)
            of_scores = weights * (of_weights - product[:, None])
            of_k = tl.dot(tl.trans(of_scores.to(k.dtype)), q, of_k, input_precision=PRECISION)
    tl.store(of_k_ptr + key_place, (of_k * scale).to(of_k_ptr.dtype.element_ty), mask=key_inside)
    tl.store(of_v_ptr + key_place, of_v.to(of_v_ptr.dtype.element_ty), mask=key_inside)
