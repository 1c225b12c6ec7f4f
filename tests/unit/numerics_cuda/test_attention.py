"""Laws of the attention kernels: decode, chunk, prefill and training are one op."""

from __future__ import annotations

import pytest
import torch

from engines.numerics.attention import causal_attention as cpu_causal_attention

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies and rounds bfloat16 wrongly; the kernels take either."""
HEADS, KEY_HEADS, DIM = 4, 2, 16
STARTS, LENGTHS = (0, 64, 192), (5, 70, 1)
ROWS = 256


def packed(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(ROWS, heads, DIM, generator=generator).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.cpu().double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (HALF, 1e-2)])
def test_attention_and_its_gradients_are_those_of_the_cpu_definition(device, dtype, bound):
    from engines.numerics import cuda

    upstream = torch.randn(ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for op, place in ((cuda.causal_attention, device), (cpu_causal_attention, "cpu")):
        inputs = [value.to(place).requires_grad_() for value in packed(dtype)]
        out = op(*inputs, starts=STARTS, lengths=LENGTHS, scale=DIM**-0.5)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream.to(place))])
    for found, wanted in zip(*results, strict=True):
        assert error(found, wanted) < bound
    outside = torch.ones(ROWS, dtype=torch.bool)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        outside[start : start + length] = False
    assert all(not found.cpu()[outside].any() for found in results[0])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_sequence_alone_has_the_bits_it_has_in_a_pack_forward_and_backward(device, dtype):
    from engines.numerics import cuda

    inputs = [value.to(device).requires_grad_() for value in packed(dtype)]
    out = cuda.causal_attention(*inputs, starts=STARTS, lengths=LENGTHS, scale=0.25)
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    start, length = STARTS[1], LENGTHS[1]
    rows = slice(start, start + length)
    alone = [value[rows].to(device).clone().requires_grad_() for value in packed(dtype)]
    single = cuda.causal_attention(*alone, starts=(0,), lengths=(length,), scale=0.25)
    assert torch.equal(single, out[rows])
    for whole, part in zip(
        gradients, torch.autograd.grad(single, alone, torch.ones_like(single)), strict=True
    ):
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("page", [8, 16, 128])
def test_decode_chunk_and_prefill_from_pages_have_the_bits_of_training(device, dtype, page):
    from engines.numerics import cuda

    q, k, v = (value.to(device) for value in packed(dtype))
    whole = cuda.causal_attention(q, k, v, starts=STARTS, lengths=LENGTHS, scale=0.25)
    # Keys before values in one page, and pages of the requests interleaved and out of order.
    per_request = -(-max(LENGTHS) // page)
    cache = torch.full((per_request * 3, KEY_HEADS, page, 2 * DIM), float("nan"), device=device)
    cache = cache.to(dtype)
    table = torch.arange(per_request * 3, device=device).flip(0).view(per_request, 3).t()
    for request, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        for position in range(length):
            slot = cache[table[request, position // page], :, position % page]
            slot[:, :DIM], slot[:, DIM:] = k[start + position], v[start + position]
    for queries in (LENGTHS, (1, 1, 1), (3, 40, 1), (0, 7, 0)):
        picked = [
            slice(start + length - count, start + length)
            for start, length, count in zip(STARTS, LENGTHS, queries, strict=True)
        ]
        out = cuda.paged_attention_batch(
            torch.cat([q[rows] for rows in picked]), cache[..., :DIM], cache[..., DIM:], table,
            query_lengths=queries, lengths=LENGTHS, scale=0.25,
        )  # fmt: skip
        assert torch.equal(out, torch.cat([whole[rows] for rows in picked])), queries


def test_one_request_from_plain_keys_has_the_bits_of_training(device):
    from engines.numerics import cuda

    q, k, v = (value[64:134].to(device) for value in packed(HALF))
    whole = cuda.causal_attention(q, k, v, starts=(0,), lengths=(70,), scale=0.25)
    assert torch.equal(cuda.paged_attention(q[60:], k, v, query_start=60, scale=0.25), whole[60:])
    with pytest.raises(ValueError, match="queries end at position 9"):
        cuda.paged_attention(q[:9], k, v, query_start=0, scale=0.25)


def test_sequences_out_of_order_are_refused(device):
    from engines.numerics import cuda

    inputs = [value.to(device) for value in packed(torch.float32)]
    with pytest.raises(ValueError, match="sequence 1 has 3 rows from row 0"):
        cuda.causal_attention(*inputs, starts=(64, 0), lengths=(3, 3), scale=1.0)


@pytest.mark.parametrize("start", [5, 16, 40])
def test_rows_before_the_first_sequence_are_no_ones(device, start):
    from engines.numerics import cuda

    q, k, v = (value.to(device) for value in packed(torch.float32))
    rows = slice(start, start + 10)
    alone = cuda.causal_attention(q[rows], k[rows], v[rows], starts=(0,), lengths=(10,), scale=0.25)
    found = cuda.causal_attention(q, k, v, starts=(0, start), lengths=(0, 10), scale=0.25)
    assert torch.equal(found[rows], alone)
    found[rows] = 0
    assert not found.any()


@pytest.mark.parametrize(
    ("starts", "lengths"), [((0,), (1000,)), ((-1,), (3,)), ((0, 2), (4, 4)), ((0,), (-1,))]
)
def test_sequences_that_overlap_or_leave_the_rows_are_refused(device, starts, lengths):
    from engines.numerics import causal_attention, cuda

    inputs = packed(torch.float32)
    for op, where in ((cuda.causal_attention, device), (causal_attention, "cpu")):
        with pytest.raises(ValueError, match=f"has {lengths[-1]} rows from row {starts[-1]}"):
            op(*(value.to(where) for value in inputs), starts=starts, lengths=lengths, scale=1.0)
