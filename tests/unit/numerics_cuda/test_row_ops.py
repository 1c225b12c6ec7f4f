"""Laws of norm, rotary, silu_mul, matmul, sums, embedding and AdamW, beside the CPU's ops."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engines.numerics.blocks import block_sum as cpu_block_sum
from engines.numerics.embedding import embedding as cpu_embedding
from engines.numerics.linear import linear_multi as cpu_linear_multi
from engines.numerics.norm import rms_norm as cpu_rms_norm
from engines.numerics.optimizer import adamw_step_ as cpu_adamw_step_
from engines.numerics.pointwise import silu_mul as cpu_silu_mul
from engines.numerics.rotary import rotary as cpu_rotary
from engines.numerics.rotary import rotary_inv_freq
from engines.numerics.sums import row_square_sums as cpu_row_square_sums

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies and rounds bfloat16 wrongly; the kernels take either."""
DTYPES = (torch.float32, HALF)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    bound = 2e-5 if wanted.dtype == torch.float32 else 2e-2
    error = (found.cpu().double() - wanted.double()).norm() / wanted.double().norm()
    assert error < bound, error


def gradients(output, inputs, upstream):
    return torch.autograd.grad(output, inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_its_gradients_are_those_of_the_cpu_definition(device, dtype):
    from engines.numerics import cuda

    values = [random(70, 48, dtype=dtype), random(48, dtype=dtype, seed=1)]
    upstream = random(70, 48, dtype=dtype, seed=2)
    ours = [value.to(device).requires_grad_() for value in values]
    theirs = [value.clone().requires_grad_() for value in values]
    out, reference = cuda.rms_norm(*ours, 1e-5), cpu_rms_norm(*theirs, 1e-5)
    near(out.detach(), reference.detach())
    for found, wanted in zip(
        gradients(out, ours, upstream.to(device)), gradients(reference, theirs, upstream),
        strict=True,
    ):  # fmt: skip
        near(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_and_norm_has_the_bits_of_add_then_norm(device, dtype):
    from engines.numerics import cuda

    x, residual = (random(9, 40, dtype=dtype, seed=seed).to(device) for seed in (0, 1))
    weight = random(40, dtype=dtype, seed=2).to(device)
    normed, summed = cuda.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, cuda.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_row_is_its_own_whatever_the_offset_and_number_of_rows(device, dtype):
    from engines.numerics import cuda

    x, weight = random(12, 48, dtype=dtype).to(device), random(48, dtype=dtype, seed=1).to(device)
    whole = cuda.rms_norm(x, weight, 1e-5)
    wide = torch.zeros(12, 51, dtype=dtype, device=device)
    wide[:, 3:] = x
    assert torch.equal(cuda.rms_norm(wide[:, 3:], weight, 1e-5), whole)
    for first, last in ((0, 1), (5, 6), (3, 12)):
        assert torch.equal(cuda.rms_norm(x[first:last], weight, 1e-5), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_and_its_gradients_are_those_of_the_cpu_definition(device, dtype):
    from engines.numerics import cuda

    both = random(6, 2 * 72, dtype=dtype)
    upstream = random(6, 72, dtype=dtype, seed=1)
    ours = [part.to(device).requires_grad_() for part in both.chunk(2, dim=1)]
    theirs = [part.clone().requires_grad_() for part in both.chunk(2, dim=1)]
    out, reference = cuda.silu_mul(*ours), cpu_silu_mul(*theirs)
    near(out.detach(), reference.detach())
    for found, wanted in zip(
        gradients(out, ours, upstream.to(device)), gradients(reference, theirs, upstream),
        strict=True,
    ):  # fmt: skip
        near(found, wanted)
    gate, up = both.to(device).chunk(2, dim=1)
    assert torch.equal(cuda.silu_mul(gate, up), out.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_as_the_cpu_definition_and_back_in_the_gradient(device, dtype):
    from engines.numerics import cuda

    x, positions = random(7, 3, 16, dtype=dtype), torch.tensor([0, 1, 2, 900, 4, 5, 63])
    frequencies = rotary_inv_freq(1e4, 16)
    ours, theirs = x.to(device).requires_grad_(), x.clone().requires_grad_()
    out = cuda.rotary(ours, positions.to(device), frequencies.to(device))
    reference = cpu_rotary(theirs, positions, frequencies)
    near(out.detach(), reference.detach())
    upstream = random(7, 3, 16, dtype=dtype, seed=1)
    near(
        gradients(out, (ours,), upstream.to(device))[0],
        gradients(reference, (theirs,), upstream)[0],
    )
    fused = torch.cat([x, x], dim=1).to(device)[:, :3]
    assert torch.equal(
        cuda.rotary(fused, positions.to(device), frequencies.to(device)), out.detach()
    )


def test_a_rounded_table_of_frequencies_is_refused(device):
    from engines.numerics import cuda

    table = rotary_inv_freq(1e4, 16).half().to(device)
    with pytest.raises(ValueError, match="float32"):
        cuda.rotary(random(1, 1, 16).to(device), torch.zeros(1, dtype=torch.int64), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_linears_and_their_gradients_are_those_of_the_cpu_definition(device, dtype):
    from engines.numerics import cuda

    x = random(66, 40, dtype=dtype)
    weights = [random(size, 40, dtype=dtype, seed=size) for size in (24, 72)]
    biases = [random(24, dtype=dtype, seed=5), None]
    upstream = [random(66, size, dtype=dtype, seed=size + 1) for size in (24, 72)]
    results = []
    for op, place in ((cuda.linear_multi, device), (cpu_linear_multi, "cpu")):
        inputs = [value.to(place).detach().requires_grad_() for value in (x, *weights, biases[0])]
        outputs = op(inputs[0], inputs[1:3], (inputs[3], None))
        moved = [value.to(place) for value in upstream]
        results.append(
            [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, moved)]
        )
    for found, wanted in zip(*results, strict=True):
        near(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_row_is_its_own_and_columns_do_not_see_each_other(device, dtype):
    from engines.numerics import cuda

    x, weight = random(33, 40, dtype=dtype).to(device), random(72, 40, dtype=dtype).to(device)
    whole = cuda.linear(x, weight)
    for first, last in ((0, 1), (7, 8), (16, 33)):
        assert torch.equal(cuda.linear(x[first:last], weight), whole[first:last])
    assert torch.equal(cuda.linear(x, weight[:24].contiguous()), whole[:, :24])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(24, 72), (64, 16, 16)])
def test_one_launch_for_several_matrices_has_the_bits_of_one_launch_each(device, sizes, dtype):
    from engines.numerics import cuda
    from engines.numerics.cuda.matmul import matmul, summed_input_gradient

    weights = [
        random(size, 40, dtype=dtype, seed=size + i).to(device) for i, size in enumerate(sizes)
    ]
    upstream = [
        random(70, size, dtype=dtype, seed=9 + i).to(device) for i, size in enumerate(sizes)
    ]
    parts = [matmul(g, w, transposed=False).float() for g, w in zip(upstream, weights, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    found = summed_input_gradient(upstream, weights)
    assert torch.equal(found, total.to(dtype))
    assert torch.equal(cuda.linear_input_gradient(upstream, weights), found)
    # The control: the parts are not added in one order for nothing.
    turned = summed_input_gradient(upstream[::-1], weights[::-1])
    assert len(sizes) == 2 or dtype != torch.float32 or not torch.equal(turned, found)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_sum_that_is_written_rounded_has_the_bits_of_one_that_is_rounded_afterwards(
    device, goes_on
):
    from engines.numerics.cuda.matmul import add_weight_gradient
    from engines.numerics.cuda.rows import block_sum

    gradient, x = random(192, 20, dtype=HALF).to(device), random(192, 24, dtype=HALF).to(device)
    before = random(20, 24, seed=3).to(device)
    total, out = before.clone(), torch.empty(20, 24, dtype=HALF, device=device)
    add_weight_gradient(total, gradient, x, out=out, fresh=not goes_on)
    assert torch.equal(total, before)
    add_weight_gradient(total, gradient, x, fresh=not goes_on)
    assert torch.equal(out, total.to(HALF))
    before = before[0, :20].contiguous() if goes_on else None
    rounded = block_sum(gradient, total=before, dtype=HALF)
    assert rounded.dtype == HALF
    assert torch.equal(rounded, block_sum(gradient, total=before).to(HALF))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_gradient_goes_on_from_a_total_and_ignores_zero_rows(device, dtype):
    from engines.numerics import cuda

    gradient, x = random(192, 20, dtype=dtype).to(device), random(192, 24, dtype=dtype).to(device)
    whole = cuda.linear_weight_gradient(gradient, x)
    total = cuda.linear_weight_gradient(gradient[:64], x[:64])
    assert torch.equal(cuda.linear_weight_gradient(gradient[64:], x[64:], total=total), whole)
    zeros = torch.zeros(64, 20, dtype=dtype, device=device)
    padded = torch.cat([gradient[:64], zeros, gradient[64:]])
    rows = torch.cat([x[:64], x[:64], x[64:]])
    assert torch.equal(cuda.linear_weight_gradient(padded, rows), whole)


def test_block_sums_add_blocks_left_to_right(device):
    from engines.numerics.cuda.rows import block_sum

    rows = random(200, 10)
    near(block_sum(rows.to(device)), cpu_block_sum(rows))
    padded = torch.cat([rows, torch.zeros(440, 10)])
    assert torch.equal(block_sum(padded.to(device)), block_sum(rows.to(device)))
    apart = torch.tensor([[1e8], *[[0.0]] * 63, [1.0], *[[0.0]] * 63, [-1e8]])
    assert block_sum(apart.to(device)).item() == 0.0
    assert block_sum(apart.flip(0).to(device)).item() == 0.0
    assert block_sum(apart[[0, 128, 64]].to(device)).item() == 1.0
    assert block_sum(torch.zeros(0, 3, device=device)).tolist() == [0.0] * 3


def test_an_embedding_gradient_adds_rows_of_one_token_in_order(device):
    from engines.numerics import cuda

    ids = torch.tensor([3, 1, 3, 0, 3, 1] * 13)
    weight, upstream = random(5, 12), random(78, 12, seed=1)
    results = []
    for op, place in ((cuda.embedding, device), (cpu_embedding, "cpu")):
        table = weight.to(place).requires_grad_()
        out = op(ids.to(place), table)
        results.append((out.detach(), torch.autograd.grad(out, table, upstream.to(place))[0]))
    assert torch.equal(results[0][0].cpu(), results[1][0])
    near(results[0][1], results[1][1])
    large = torch.tensor([[1e8], [1.0], [-1e8]])
    for order, wanted in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        table = torch.zeros(2, 1, device=device).requires_grad_()
        out = cuda.embedding(torch.ones(3, dtype=torch.int64, device=device), table)
        assert torch.autograd.grad(out, table, large[order].to(device))[0][1].item() == wanted


def test_an_adamw_step_has_the_bits_of_the_cpu_definition(device):
    from engines.numerics import cuda

    state = [random(37, 41, seed=seed) for seed in range(3)] + [random(37, 41, seed=3).square()]
    options = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
    ours = [value.to(device) for value in state]
    cuda.adamw_step_(*ours, step=3, **options)
    cpu_adamw_step_(*state, step=3, **options)
    for found, wanted in zip(ours, state, strict=True):
        assert torch.equal(found.cpu(), wanted)
    with pytest.raises(ValueError, match="first step is 1"):
        cuda.adamw_step_(*ours, step=0, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_go_on_over_the_parts_of_a_slot(device, dtype):
    from engines.numerics import cuda
    from engines.numerics.slot_sums import SlotSums

    ids = (torch.arange(192) * 5 % 7).to(device)

    def outputs(x, rows, matrix, bias, scale, table):
        hidden = cuda.linear(x[rows], matrix, bias)
        hidden = cuda.rms_norm(hidden, scale, 1e-5) + cuda.embedding(ids[rows], table)
        return torch.stack(cuda.head_logprobs(hidden, matrix, ids[rows], temperature=0.7))

    x = random(192, 16, dtype=dtype).to(device)
    shapes = ((16, 16), (16,), (16,), (7, 16))
    found = []
    for cut in ((0, 192), (0, 64, 192), (0, 64, 128, 192)):
        leaves = [
            random(*shape, dtype=dtype, seed=seed).to(device).requires_grad_()
            for seed, shape in enumerate(shapes, start=1)
        ]
        sums = SlotSums()
        for first, end in pairwise(cut):
            with sums.part(last=end == 192):
                outputs(x, slice(first, end), *leaves).sum().backward()
            if end != 192:
                assert all(leaf.grad is None for leaf in leaves)
        found.append([leaf.grad for leaf in leaves])
    for other in found[1:]:
        for one, two in zip(other, found[0], strict=True):
            assert torch.equal(one, two)


def test_many_tensors_step_and_are_summed_in_one_launch_with_the_bits_of_each_alone(device):
    from engines.numerics import cuda

    shapes = ((3, 5), (7,), (0, 4), (2, 600), (9, 4, 3), (1, 1))
    options = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
    states = [
        [random(*shape, seed=4 * i + j).abs() for i, shape in enumerate(shapes)] for j in range(4)
    ]
    ours = [[tensor.to(device) for tensor in tensors] for tensors in states]
    cuda.adamw_steps_(*ours, step=3, **options)
    for state in zip(*states, strict=True):
        cpu_adamw_step_(*state, step=3, **options)
    for found, wanted in zip(ours, states, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(ValueError, match="float32"):
        cuda.adamw_steps_([ours[0][0].half()], *([t[0]] for t in ours[1:]), step=1, **options)
    for dtype in DTYPES:
        tensors = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        sums = cuda.many_row_square_sums([tensor.to(device) for tensor in tensors])
        assert [len(rows) for rows in sums] == [shape[0] for shape in shapes]
        for found, tensor in zip(sums, tensors, strict=True):
            assert torch.equal(found.cpu(), cpu_row_square_sums(tensor))


def test_operands_of_one_dimension_may_have_any_stride(device):
    from engines.numerics import cuda

    x, weight, wide = random(6, 16), random(10, 16, seed=1), random(20, seed=2)
    values = [value.to(device) for value in (x, weight, wide[::2])]
    assert torch.equal(cuda.linear(*values), cuda.linear(*values[:2], values[2].contiguous()))
    frequencies = rotary_inv_freq(1e4, 8).repeat_interleave(2).to(device)[::2]
    positions = torch.arange(12).to(device)[::2]
    heads = values[0].view(6, 2, 8)
    assert torch.equal(
        cuda.rotary(heads, positions, frequencies),
        cuda.rotary(heads, positions.contiguous(), frequencies.contiguous()),
    )


def test_shapes_that_do_not_fit_are_refused_as_on_the_cpu(device):
    from engines.numerics import cuda

    heads, positions = random(3, 2, 8).to(device), torch.arange(3).to(device)
    frequencies = rotary_inv_freq(1e4, 8).to(device)
    for op, where in ((cuda.rotary, device), (cpu_rotary, "cpu")):
        for wrong in (
            (heads[..., :7], positions, frequencies),
            (heads, positions, frequencies[:2]),
            (heads, positions[:2], frequencies),
        ):
            with pytest.raises(ValueError, match="every row needs a position"):
                op(*(value.to(where) for value in wrong))
    with pytest.raises(ValueError, match="a weight for each column"):
        cuda.rms_norm(random(4, 3, 8).to(device), random(8).to(device), 1e-6)


@pytest.mark.parametrize("wrong", ["one gradient", "a bfloat16 gradient", "a strided moment"])
def test_a_step_of_adamw_refuses_what_it_would_misread(device, wrong):
    from engines.numerics import cuda

    for op, where in ((cuda.adamw_step_, device), (cpu_adamw_step_, "cpu")):
        param, gradient, mean, square = (torch.ones(4, 6, device=where) for _ in range(4))
        if wrong == "one gradient":
            gradient = gradient[0, :1]
        elif wrong == "a bfloat16 gradient":
            gradient = gradient.bfloat16()
        else:
            mean = torch.ones(6, 4, device=where).t()
        with pytest.raises(ValueError, match=r"adamw_step_: (grad|exp_avg) is"):
            op(
                param, gradient, mean, square, step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8,
                weight_decay=0.0,
            )  # fmt: skip
