"""The laws of the shared ops at the shapes that the GPU recipes run, on the device itself.

Shapes are those of Qwen2.5-0.5B and SmolLM2-135M. Each law has a control that must fail, so that a
test cannot pass by comparing nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.draws import random

ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 1000, 2048)
PLACES = (1, 5, 64, 129, 500)
SHAPES = {
    "qwen qkv": (896, 1152),
    "qwen o": (896, 896),
    "qwen gate_up": (896, 9728),
    "qwen down": (4864, 896),
    "qwen head": (896, 151936),
    "smol qkv": (576, 960),
    "smol o": (576, 576),
    "smol gate_up": (576, 3072),
    "smol down": (1536, 576),
    "smol head": (576, 49152),
    "tiny gate_up": (128, 352),
    "tiny down": (176, 128),
}
HEADS = {"qwen": (14, 2, 64), "smol": (9, 3, 64), "wide": (16, 8, 128)}


def broken_rows(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[object]:
    """Return row counts and places at which rows of `op` differ from those in the whole of `x`."""
    whole = op(x)
    broken: list[object] = [
        count for count in ROWS if count < len(x) and not torch.equal(op(x[:count]), whole[:count])
    ]
    broken += [
        ("from", place)
        for place in PLACES
        if place + 40 <= len(x)
        and not torch.equal(op(x[place : place + 40]), whole[place : place + 40])
    ]
    return broken


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_of_a_product_does_not_see_the_other_rows(name):
    from engines import numerics

    inner, outer = SHAPES[name]
    count = 1300 if outer > 40000 else 2304
    x, weight = random(count, inner), random(outer, inner, seed=1, scale=0.02)
    assert broken_rows(lambda rows: numerics.linear(rows, weight), x) == []
    gradient = random(count, outer, seed=2)
    assert broken_rows(lambda g: numerics.linear_input_gradient((g,), (weight,)), gradient) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gradient_that_matrices_share_is_the_sum_of_the_products_of_each(dtype):
    from engines import numerics

    for inner, parts in ((896, (896, 128, 128)), (576, (576, 192, 192)), (896, (4864, 4864))):
        weights = [
            random(part, inner, seed=part + i, scale=0.02).to(dtype) for i, part in enumerate(parts)
        ]
        upstream = [random(1300, part, seed=3 + i).to(dtype) for i, part in enumerate(parts)]
        shared = numerics.linear_input_gradient(upstream, weights)
        total = torch.zeros(1300, inner, device="cuda")
        for gradient, weight in zip(upstream, weights, strict=True):
            total += numerics.linear_input_gradient((gradient,), (weight,)).float()
        assert torch.equal(shared, total.to(dtype))
        width = sum(parts)
        assert (
            broken_rows(
                lambda g, p=parts, w=weights: numerics.linear_input_gradient(g.split(p, 1), w),
                random(1300, width, seed=4).to(dtype),
            )
            == []
        )


def test_fused_and_separate_matrices_give_the_same_columns():
    from engines import numerics

    for inner, parts in ((896, (896, 128, 128)), (576, (576, 192, 192)), (896, (4864, 4864))):
        weights = [random(part, inner, seed=part + i, scale=0.02) for i, part in enumerate(parts)]
        biases = [random(part, seed=7 + i) for i, part in enumerate(parts)]
        for count in (1, 16, 128, 1000):
            x = random(count, inner, seed=count)
            fused = numerics.linear(x, torch.cat(weights), torch.cat(biases)).split(parts, dim=1)
            apart = numerics.linear_multi(x, weights, biases)
            assert all(map(torch.equal, fused, apart)), (inner, parts, count)


def test_a_bias_is_invariant_too():
    from engines import numerics

    x, weight, bias = random(2304, 896), random(1152, 896, seed=1, scale=0.02), random(1152, seed=2)
    assert broken_rows(lambda rows: numerics.linear(rows, weight, bias), x) == []


def test_the_probe_finds_an_op_that_does_see_other_rows():
    x = random(256, 896)
    assert broken_rows(lambda rows: rows - rows.float().mean(0).bfloat16(), x)


@pytest.mark.parametrize("width", [576, 896, 4864])
def test_a_row_of_a_norm_does_not_see_the_other_rows_fused_or_not(width):
    from engines import numerics
    from engines.numerics import cuda

    x, weight = random(2304, width), random(width, seed=1)
    assert broken_rows(lambda rows: numerics.rms_norm(rows, weight, 1e-6), x) == []
    residual = random(2304, width, seed=2)
    normed, summed = cuda.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, numerics.rms_norm(x + residual, weight, 1e-6))


def test_a_log_prob_does_not_see_rows_dtype_or_stride():
    from engines import numerics
    from engines.numerics import cuda

    logits = random(600, 151936, scale=3.0)
    ids = torch.arange(600, device="cuda") * 251
    whole = numerics.chosen_logprobs(logits, ids, temperature=1.0)
    for count in (1, 2, 7, 64, 200):
        part = numerics.chosen_logprobs(logits[:count], ids[:count], temperature=1.0)
        assert torch.equal(part, whole[:count])
    assert torch.equal(cuda.token_logprobs(logits.float(), ids[:, None])[:, 0], whole)
    padded = torch.zeros(600, 151936 + 5, dtype=torch.bfloat16, device="cuda")
    padded[:, 5:] = logits
    assert torch.equal(cuda.token_logprobs(padded[:, 5:], ids[:, None])[:, 0], whole)
    exact = torch.log_softmax(logits[:64].double(), -1).gather(1, ids[:64, None])[:, 0]
    assert (whole[:64].double() - exact).abs().max() < 4e-6


@pytest.mark.parametrize("name", HEADS)
def test_decode_chunk_and_prefill_over_pages_have_the_bits_of_training(name):
    from engines import numerics

    heads, key_heads, width = HEADS[name]
    lengths = [5, 16, 64, 65, 127, 200, 333, 500, 1, 64, 700, 17]
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + -(-length // 64) * 64)
    rows = starts[-1] + 64
    q, k, v = (
        random(rows, n, width, seed=n + i) for i, n in enumerate((heads, key_heads, key_heads))
    )
    options = {"scale": width**-0.5}
    whole = numerics.causal_attention(q, k, v, starts=starts, lengths=lengths, **options)
    for position, start, length in zip(range(12), starts, lengths, strict=True):
        span = slice(start, start + length)
        alone = numerics.causal_attention(
            q[span], k[span], v[span], starts=(0,), lengths=(length,), **options
        )
        assert torch.equal(alone, whole[span]), position
    page = 16
    per_request = -(-max(lengths) // page)
    order = torch.randperm(per_request * len(lengths), generator=torch.Generator().manual_seed(0))
    table = order.view(len(lengths), per_request).to("cuda")
    # NHD in memory, as vLLM lays it out, and NaN where nothing was written.
    cache = torch.full((order.numel(), page, key_heads, 2 * width), float("nan"), device="cuda")
    cache = cache.bfloat16().transpose(1, 2)
    for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        place = torch.arange(length, device="cuda")
        pages = table[request, place // page]
        cache[pages, :, place % page] = torch.cat(
            (k[start : start + length], v[start : start + length]), dim=-1
        )
    for most in (1, 2, 33, 64, 1000):
        queries = [min(most, length) for length in lengths]
        spans = [
            slice(start + length - count, start + length)
            for start, length, count in zip(starts, lengths, queries, strict=True)
        ]
        found = numerics.paged_attention_batch(
            torch.cat([q[span] for span in spans]), cache[..., :width], cache[..., width:], table,
            query_lengths=queries, lengths=lengths, **options,
        )  # fmt: skip
        assert torch.equal(found, torch.cat([whole[span] for span in spans])), most


def test_a_length_beyond_the_page_table_reads_no_other_memory():
    """vLLM's dummy batches claim more positions than their table has pages for."""
    from engines.numerics import cuda

    pages = random(16, 2, 16, 128)
    # What lies behind the table would be read as pages far outside of the cache.
    around = torch.full((4, 4), 2**30, dtype=torch.int32, device="cuda")
    around[:2] = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
    options = {
        "query_starts": torch.tensor([0, 200, 400], dtype=torch.int32, device="cuda"),
        "max_query_length": 200,
        "scale": 0.125,
    }
    q, out = random(400, 14, 64, seed=1), torch.zeros(400, 14, 64, device="cuda").bfloat16()
    lengths = torch.tensor([200, 200], dtype=torch.int32, device="cuda")
    cuda.attend_pages(
        q, pages[..., :64], pages[..., 64:], around[:2], lengths=lengths, out=out, **options
    )
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", HEADS)
def test_attention_and_its_gradients_are_near_float64(name):
    from engines import numerics

    heads, key_heads, width = HEADS[name]
    length = 200
    values = [
        random(length, n, width, seed=n + i) for i, n in enumerate((heads, key_heads, key_heads))
    ]
    upstream = random(length, heads, width, seed=9)
    ours = [value.clone().requires_grad_() for value in values]
    out = numerics.causal_attention(*ours, starts=(0,), lengths=(length,), scale=width**-0.5)
    exact = [value.double().requires_grad_() for value in values]
    q, k, v = (t.transpose(0, 1) for t in exact)
    k, v = (t.repeat_interleave(heads // key_heads, 0) for t in (k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = wanted.transpose(0, 1)
    pairs = [(out, wanted)]
    pairs += zip(
        torch.autograd.grad(out, ours, upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    )
    for found, reference in pairs:
        assert (found.double() - reference).norm() / reference.norm() < 6e-3


def test_in_float32_a_layer_and_its_gradient_norm_are_within_a_millionth_of_float64():
    """No TF32 anywhere: a tenth of its precision would already show."""
    from engines import numerics

    rows, width, inner = 192, 896, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(*shape, generator=generator, device="cuda") * scale
        for shape, scale in (
            ((rows, width), 1.0), ((width,), 1.0), ((1152, width), 0.03), ((width, width), 0.03),
            ((2 * inner, width), 0.03), ((width, inner), 0.03), ((4000, width), 0.03),
        )
    ]  # fmt: skip
    ids = torch.arange(rows, device="cuda") * 17

    def ours(x, norm, qkv, output, up, down, head):
        normed = numerics.rms_norm(x, norm, 1e-6)
        q, k, v = numerics.linear(normed, qkv).split((896, 128, 128), dim=1)
        mixed = numerics.causal_attention(
            q.view(rows, 14, 64), k.view(rows, 2, 64), v.view(rows, 2, 64),
            starts=(0,), lengths=(rows,), scale=0.125,
        )  # fmt: skip
        x = numerics.add(x, numerics.linear(mixed.reshape(rows, 896), output))
        gate, high = numerics.linear(numerics.rms_norm(x, norm, 1e-6), up).chunk(2, dim=1)
        x = numerics.add(x, numerics.linear(numerics.silu_mul(gate, high), down))
        return numerics.head_logprobs(x, head, ids, temperature=0.8)[0]

    def exact(x, norm, qkv, output, up, down, head):
        def normalise(value):
            return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6) * norm

        q, k, v = (normalise(x) @ qkv.t()).split((896, 128, 128), dim=1)
        q, k, v = (t.view(rows, -1, 64).transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(7, 0) for t in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(rows, 896) @ output.t()
        gate, high = (normalise(x) @ up.t()).chunk(2, dim=1)
        x = x + (gate * torch.sigmoid(gate) * high) @ down.t()
        return torch.log_softmax(x @ head.t() / 0.8, -1).gather(1, ids[:, None])[:, 0]

    figures = []
    for op, dtype in ((ours, torch.float32), (exact, torch.float64)):
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        scores = op(*inputs)
        gradients = torch.autograd.grad(scores.mean(), inputs)
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        figures.append((scores.detach().double(), norm, gradients))
    (scores, norm, found), (reference, exact_norm, wanted) = figures
    assert (scores - reference).abs().max() < 2e-5
    assert abs(norm / exact_norm - 1) < 1e-6
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 5e-6


def test_a_weight_gradient_is_the_sum_over_blocks_whatever_is_packed_or_padded():
    from engines import numerics

    for inner, outer in ((896, 4864), (576, 49152)):
        gradient, x = random(640, outer, scale=0.1), random(640, inner, seed=1)
        whole = numerics.linear_weight_gradient(gradient, x)
        total = numerics.linear_weight_gradient(gradient[:256], x[:256])
        numerics.linear_weight_gradient(gradient[256:], x[256:], total=total)
        assert torch.equal(total, whole)
        zeros = torch.zeros(128, outer, dtype=torch.bfloat16, device="cuda")
        padded = numerics.linear_weight_gradient(
            torch.cat((gradient[:256], zeros, gradient[256:], zeros)),
            torch.cat((x[:256], x[:128], x[256:], x[:128])),
        )
        assert torch.equal(padded, whole)
        exact = gradient.double().t() @ x.double()
        assert (whole.double() - exact).norm() / exact.norm() < 1e-5
        assert not torch.equal(numerics.linear_weight_gradient(gradient.flip(0), x.flip(0)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_digest_on_the_device_is_the_digest_on_the_host(dtype):
    from engines.provenance.tensor_digest import digest_tensor, partial_of_tensor

    values = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    moved = values.to("cuda")
    assert digest_tensor("w", moved) == digest_tensor("w", values)
    parts = [
        partial_of_tensor(moved[:100], name="w", shape=(300, 700)),
        partial_of_tensor(moved[100:, :300], name="w", shape=(300, 700), row_offset=100),
        partial_of_tensor(
            moved[100:, 300:], name="w", shape=(300, 700), row_offset=100, column_offset=300
        ),
    ]
    assert parts[0].merge(parts[1]).merge(parts[2]).hexdigest() == digest_tensor("w", values)
    flat = moved.view(-1)
    assert digest_tensor("b", flat) == digest_tensor("b", values.view(-1))
    moved[7, 7] += 1
    assert digest_tensor("w", moved) != digest_tensor("w", values)
    with pytest.raises(ValueError, match="outside"):
        partial_of_tensor(moved, name="w", shape=(300, 700), row_offset=1)


def test_row_square_sums_have_the_bits_of_the_host():
    from engines import numerics

    values = torch.randn(500, 896, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        numerics.row_square_sums(values.to("cuda")).cpu(), numerics.row_square_sums(values)
    )


def test_tiles_decide_no_bit():
    """What `chosen_tile` picks is a matter of speed alone: narrow, wide, few rows and many."""
    from engines.numerics.cuda.matmul import Tile, matmul

    tiles = (
        Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 32, 64, 4, 4),
        Tile(64, 16, 128, 4, 4), Tile(64, 32, 64, 4, 4), Tile(64, 64, 64, 4, 4),
    )  # fmt: skip
    for inner, outer in ((896, 1152), (4864, 896), (576, 3072), (176, 128)):
        x, weight = random(300, inner), random(outer, inner, seed=1, scale=0.02)
        gradient = random(300, outer, seed=2)
        whole = matmul(x, weight, transposed=True, tile=tiles[0])
        back = matmul(gradient, weight, transposed=False, tile=tiles[0])
        for tile in tiles[1:]:
            assert torch.equal(matmul(x, weight, transposed=True, tile=tile), whole), tile
            assert torch.equal(matmul(gradient, weight, transposed=False, tile=tile), back), tile
        exact = x.double() @ weight.double().t()
        assert (whole.double() - exact).norm() / exact.norm() < 3e-3


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as columns of a wider tensor that begin at no multiple of 16 bytes."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
    place = wide[..., 3:-5]
    place.copy_(x)
    assert place.data_ptr() % 16
    return place


@pytest.mark.parametrize("op", ["products", "attention", "experts"])
def test_where_an_operand_lies_in_memory_cannot_be_seen(op):
    from engines import numerics

    heads, key_heads, width = HEADS["qwen"]
    if op == "products":
        values = [random(300, 896), random(1152, 896, seed=1, scale=0.02)]

        def run(x, weight):
            return numerics.linear(x, weight)

    elif op == "attention":
        values = [random(300, count, width, seed=count) for count in (heads, key_heads)]
        values.append(random(300, key_heads, width, seed=9))

        def run(q, k, v):
            return numerics.causal_attention(
                q, k, v, starts=(0, 200), lengths=(200, 100), scale=width**-0.5
            )

    else:
        experts = torch.arange(600, device="cuda").view(300, 2) % 4
        weights = torch.rand(300, 2, device="cuda")
        shapes = [(96, 256)] * 8 + [(256, 96)] * 4
        values = [random(300, 256), *(random(*shape, seed=2 + i) for i, shape in enumerate(shapes))]

        def run(hidden, *flat):
            return numerics.expert_mlp(hidden, experts, weights, flat[:4], flat[4:8], flat[8:])

    found = []
    for place in (torch.clone, elsewhere):
        leaves = [place(value).detach().requires_grad_() for value in values]
        out = run(*leaves)
        upstream = place(random(*out.shape, seed=77))
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    assert all(map(torch.equal, *found))
