"""Attention: decode, chunk, prefill and training are one function, whatever is batched together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engines.numerics import causal_attention, paged_attention, paged_attention_batch

STARTS, LENGTHS = (0, 64, 320, 384, 512), (3, 250, 64, 65, 1)
ROWS = 576
SHAPES = [(9, 3, 64), (4, 4, 24), (8, 1, 80)]


def random_heads(rows, shape, dtype):
    query_heads, key_heads, size = shape
    return [torch.randn(rows, h, size).to(dtype) for h in (query_heads, key_heads, key_heads)]


def attend(q, k, v, starts=STARTS, lengths=LENGTHS):
    return causal_attention(q, k, v, starts=starts, lengths=lengths, scale=q.shape[-1] ** -0.5)


def attend_with_gradients(q, k, v, upstream, starts=STARTS, lengths=LENGTHS):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, starts, lengths)
    out.backward(upstream)
    return [out.detach(), *(t.grad for t in leaves)]


def plain_attention(q, k, v, starts, lengths):
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for start, length in zip(starts, lengths, strict=True):
        rows = slice(start, start + length)
        query, key, value = (t[rows].transpose(0, 1) for t in (q, k, v))
        key, value = (t.repeat_interleave(group, 0) for t in (key, value))
        scores = query @ key.transpose(1, 2) * q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out[rows] = (weights @ value).transpose(0, 1)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_match_float64(shape, dtype, relative_error, tolerance):
    q, k, v = random_heads(ROWS, shape, dtype)
    upstream = torch.randn_like(q)
    mine = attend_with_gradients(q, k, v, upstream)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    reference = plain_attention(*exact, STARTS, LENGTHS)
    reference.backward(upstream.double())
    for value, target in zip(mine, [reference, *(t.grad for t in exact)], strict=True):
        assert relative_error(value, target.detach()) < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_sequence_has_the_bits_of_a_lone_one(shape, dtype, same_bits):
    q, k, v = random_heads(ROWS, shape, dtype)
    upstream = torch.randn_like(q)
    packed = attend_with_gradients(q, k, v, upstream)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, length in zip(STARTS, LENGTHS, strict=True):
            rows = slice(start, start + length)
            lone = [t[rows] for t in (q, k, v, upstream)]
            alone = attend_with_gradients(*lone, (0,), (length,))
            assert all(same_bits(a[rows], b) for a, b in zip(packed, alone, strict=True))


def test_order_of_sequences_and_zero_rows_change_no_bit(dtype, same_bits):
    q, k, v = random_heads(ROWS, SHAPES[0], dtype)
    upstream = torch.randn_like(q)
    packed = attend_with_gradients(q, k, v, upstream)
    order = (3, 1, 0, 2)
    starts, row = {}, 5
    for index in order:
        starts[index] = row
        row += LENGTHS[index] + 7
    moved = [torch.zeros(row, *t.shape[1:], dtype=dtype) for t in (q, k, v, upstream)]
    for old, new in zip((q, k, v, upstream), moved, strict=True):
        for index in order:
            here = slice(starts[index], starts[index] + LENGTHS[index])
            new[here] = old[STARTS[index] : STARTS[index] + LENGTHS[index]]
    results = attend_with_gradients(
        *moved, tuple(starts[i] for i in order), tuple(LENGTHS[i] for i in order)
    )
    for old, new in zip(packed, results, strict=True):
        for index in order:
            here = slice(starts[index], starts[index] + LENGTHS[index])
            assert same_bits(new[here], old[STARTS[index] : STARTS[index] + LENGTHS[index]])


def test_rows_of_no_sequence_are_zero_and_get_no_gradient(dtype):
    q, k, v = random_heads(ROWS, SHAPES[0], dtype)
    outside = torch.ones(ROWS, dtype=torch.bool)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        outside[start : start + length] = False
    for result in attend_with_gradients(q, k, v, torch.randn_like(q)):
        assert not result[outside].any()
        assert result[~outside].any()


def test_no_sequences_give_zeros(dtype):
    q, k, v = random_heads(64, SHAPES[0], dtype)
    for result in attend_with_gradients(q, k, v, torch.randn_like(q), (0,), (0,)):
        assert not result.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_chunk_and_prefill_are_the_same_bits(shape, dtype, same_bits):
    length = 200
    q, k, v = random_heads(length, shape, dtype)
    scale = shape[2] ** -0.5
    whole = attend(q, k, v, (0,), (length,))
    for chunk in (1, 5, 17, 63, 64, 100, length):
        parts = [
            paged_attention(q[i:end], k[:end], v[:end], query_start=i, scale=scale)
            for i in range(0, length, chunk)
            for end in (min(i + chunk, length),)
        ]
        assert same_bits(torch.cat(parts), whole), f"chunks of {chunk}"


@pytest.mark.parametrize("page", [16, 64, 128])
def test_a_batch_over_pages_equals_each_request_alone(page, dtype, same_bits):
    query_lengths, lengths = (1, 70, 1, 3, 1, 130), (1, 70, 200, 67, 64, 190)
    pages_each = 256 // page
    shape = (9, 3, 64)
    used = torch.randperm(len(lengths) * pages_each).view(len(lengths), pages_each)
    cache = torch.full((used.numel(), 3, page, 128), torch.nan).to(dtype)
    queries, expected = [], []
    for row, (count, length) in enumerate(zip(query_lengths, lengths, strict=True)):
        q, k, v = random_heads(length, shape, dtype)
        queries.append(q[length - count :])
        expected.append(attend(q, k, v, (0,), (length,))[length - count :])
        for position in range(length):
            there = cache[used[row, position // page], :, position % page]
            there[:, :64], there[:, 64:] = k[position], v[position]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = paged_attention_batch(
            torch.cat([*queries, torch.ones(2, 9, 64, dtype=dtype)]),
            cache[..., :64],
            cache[..., 64:],
            used.int(),
            query_lengths=query_lengths,
            lengths=lengths,
            scale=0.125,
        )
        assert same_bits(out[:-2], torch.cat(expected))
        assert not out[-2:].any()


def test_strided_inputs_and_recording_gradients_change_no_bit(dtype, same_bits):
    fused = torch.randn(ROWS, 15, 64).to(dtype)
    views = fused.split([9, 3, 3], 1)
    without = attend(*(t.contiguous() for t in views))
    with_gradients = attend(views[0].requires_grad_(), *views[1:])
    assert with_gradients.requires_grad
    assert same_bits(with_gradients.detach(), without)


def test_a_later_key_changes_no_earlier_row(dtype, same_bits):
    q, k, v = random_heads(200, SHAPES[0], dtype)
    before = attend(q, k, v, (0,), (200,))
    k[150], v[150] = 7.0, -7.0
    after = attend(q, k, v, (0,), (200,))
    assert same_bits(after[:150], before[:150])
    assert not same_bits(after[150:], before[150:])


def test_stock_attention_depends_on_what_else_is_there(same_bits):
    q, k, v = (t.transpose(0, 1)[None] for t in random_heads(200, (4, 4, 64), torch.float32))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    prefixes = [
        F.scaled_dot_product_attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n])
        for n in range(1, 200)
    ]
    assert not same_bits(torch.cat(prefixes, 2), whole[:, :, :199])


def test_keys_that_do_not_reach_the_queries_are_refused():
    q, k, v = random_heads(10, SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="queries end at position 12, keys at 10"):
        paged_attention(q[:2], k, v, query_start=10, scale=1.0)
    with pytest.raises(ValueError, match="page of 48"):
        paged_attention_batch(
            q,
            torch.zeros(1, 3, 48, 64),
            torch.zeros(1, 3, 48, 64),
            torch.zeros(1, 1),
            query_lengths=(10,),
            lengths=(10,),
            scale=1.0,
        )
