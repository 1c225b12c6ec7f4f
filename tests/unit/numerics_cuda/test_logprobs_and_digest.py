"""Laws of log-probs and tensor digest beside the CPU's definitions."""

from __future__ import annotations

import math

import pytest
import torch

from engines.numerics.logprobs import Forbidden
from engines.numerics.logprobs import chosen_logprobs as cpu_chosen_logprobs
from engines.numerics.logprobs import head_logprobs as cpu_head_logprobs
from engines.provenance.digest import partial_of

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter multiplies and rounds bfloat16 wrongly; the kernels take either."""
COLUMNS = 5000


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(0)) * 4
    return values.to(dtype)


IDS = torch.tensor([0, 7, 4999, 3, 3, 1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_chosen_logprobs_and_gradient_are_near_float64(device, dtype, temperature):
    from engines.numerics import cuda

    ours = logits(dtype).to(device).requires_grad_()
    out = cuda.chosen_logprobs(ours, IDS.to(device), temperature=temperature)
    exact = logits(dtype).double().requires_grad_()
    wanted = torch.log_softmax(exact / temperature, -1).gather(1, IDS[:, None])[:, 0]
    assert torch.allclose(out.detach().cpu().double(), wanted.detach(), atol=4e-6)
    upstream = torch.randn(6, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(out, ours, upstream.to(device))
    (reference,) = torch.autograd.grad(wanted, exact, upstream.double())
    assert (found.cpu().double() - reference).norm() / reference.norm() < (
        1e-5 if dtype == torch.float32 else 1e-2
    )
    theirs = cpu_chosen_logprobs(logits(dtype), IDS, temperature=temperature)
    assert torch.allclose(out.detach().cpu(), theirs, atol=4e-6)


def test_a_row_has_one_logprob_in_either_dtype_at_any_stride_and_among_any_rows(device):
    from engines.numerics import cuda

    small = logits(HALF).to(device)
    whole = cuda.chosen_logprobs(small, IDS.to(device), temperature=1.0)
    assert torch.equal(cuda.chosen_logprobs(small.float(), IDS.to(device), temperature=1.0), whole)
    wide = torch.zeros(6, COLUMNS + 3, dtype=HALF, device=device)
    wide[:, 3:] = small
    assert torch.equal(cuda.chosen_logprobs(wide[:, 3:], IDS.to(device), temperature=1.0), whole)
    alone = cuda.chosen_logprobs(small[4:5], IDS[4:5].to(device), temperature=1.0)
    assert torch.equal(alone, whole[4:5])
    assert torch.equal(cuda.token_logprobs(small, IDS[:, None].to(device))[:, 0], whole)
    rows = cuda.log_softmax_rows(small.float())
    assert torch.equal(rows.gather(1, IDS[:, None].to(device))[:, 0], whole)


def test_one_program_a_row_and_several_give_the_same_bits(device, monkeypatch):
    from engines.numerics import cuda
    from engines.numerics.cuda import logprobs

    hidden, weight = torch.eye(6, device=device), logits().t().contiguous().to(device)
    results = []
    for many in (1, 1000):
        monkeypatch.setattr(logprobs, "_MANY_ROWS", many)
        values = logits(HALF).to(device)
        values[2, 17] = math.nan
        results.append(
            [
                cuda.chosen_logprobs(values, IDS.to(device), temperature=0.7),
                *cuda.head_logprobs(hidden, weight, IDS.to(device), temperature=0.7),
            ]
        )
    for one, several in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(), several.nan_to_num())
    assert torch.isnan(results[1][0]).tolist() == [False, False, True, False, False, False]


def test_tempering_in_place_gives_the_logprobs_of_that_temperature(device):
    from engines.numerics import cuda

    values = logits(HALF).to(device).float()
    wanted = cuda.chosen_logprobs(values, IDS.to(device), temperature=0.7)
    rows = torch.tensor([1, 1, 0, 1, 1, 1], device=device)
    cuda.temper_(values, rows, torch.tensor([0.0, 0.7], device=device))
    found = cuda.token_logprobs(values, IDS[:, None].to(device))[:, 0]
    assert torch.equal(found[rows == 1], wanted[rows == 1])
    assert not torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_no_number_makes_its_row_nan_and_no_other(device, value):
    from engines.numerics import cuda

    values = logits().to(device)
    values[2, 17] = value
    out = cuda.chosen_logprobs(values, IDS.to(device), temperature=1.0)
    assert torch.isnan(out).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_head_logprobs_and_gradients_are_those_of_the_cpu_definition(device, dtype):
    from engines.numerics import cuda

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(70, 24, generator=generator).to(dtype)
    weight = (torch.randn(90, 24, generator=generator) * 0.3).to(dtype)
    ids = torch.randint(90, (70,), generator=generator)
    upstream = [torch.randn(70, generator=generator) for _ in range(2)]
    results = []
    for op, place in ((cuda.head_logprobs, device), (cpu_head_logprobs, "cpu")):
        inputs = [value.to(place).requires_grad_() for value in (hidden, weight)]
        outputs = op(*inputs, ids.to(place), temperature=0.9)
        moved = [value.to(place) for value in upstream]
        results.append(
            [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, inputs, moved)]
        )
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for found, wanted in zip(*results, strict=True):
        assert (found.cpu().double() - wanted.double()).norm() / wanted.double().norm() < bound


def test_head_logprobs_are_those_of_linear_and_chosen_logprobs(device):
    from engines.numerics import cuda

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 24, generator=generator).to(HALF).to(device)
    weight = torch.randn(90, 24, generator=generator).to(HALF).to(device)
    ids = torch.arange(5, device=device)
    apart = cuda.chosen_logprobs(cuda.linear(hidden, weight), ids, temperature=1.0)
    assert torch.equal(cuda.head_logprobs(hidden, weight, ids, temperature=1.0)[0], apart)


# float16, which no run uses, has no number that is low enough.
@pytest.mark.parametrize("dtype", sorted({torch.float32, HALF} - {torch.float16}, key=str))
def test_forbidden_tokens_are_minus_infinity_to_the_bit_and_have_no_gradient(device, dtype):
    from engines.numerics import cuda

    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 24, generator=generator).to(dtype).to(device)
    weight = (torch.randn(90, 24, generator=generator) * 0.3).to(dtype).to(device)
    ids = torch.arange(20, 26, device=device)
    forbidden = Forbidden(
        torch.tensor([3, 89], device=device), torch.tensor([True, False] * 3, device=device)
    )
    logits = cuda.linear(hidden, weight)
    logits[forbidden.rows.nonzero(), forbidden.ids] = -math.inf
    inputs = [value.requires_grad_() for value in (hidden, weight)]
    outputs = cuda.head_logprobs(*inputs, ids, temperature=0.7, forbidden=forbidden)
    assert torch.equal(outputs[0], cuda.chosen_logprobs(logits, ids, temperature=0.7))
    free = cuda.head_logprobs(*inputs, ids, temperature=0.7)
    assert torch.equal(free[0] == outputs[0], ~forbidden.rows)
    assert outputs[1].isfinite().all()
    everywhere = forbidden._replace(rows=torch.ones_like(forbidden.rows))
    outputs = cuda.head_logprobs(*inputs, ids, temperature=0.7, forbidden=everywhere)
    of_hidden, of_weight = torch.autograd.grad(sum(outputs).sum(), inputs)
    assert of_hidden.isfinite().all()
    assert not of_weight[forbidden.ids].any()
    assert of_weight[ids].all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_digest_sums_are_those_of_the_numpy_definition(device, dtype):
    from engines.numerics.cuda import WordBlock, digest_sums

    words = torch.randint(
        -(2**31), 2**31 - 1, (37, 600), generator=torch.Generator().manual_seed(0)
    )
    words = words.to(dtype)
    name = str(dtype).removeprefix("torch.")

    def sums(values):
        moved = values.to(device)
        return digest_sums(
            [
                WordBlock(moved[3:30, 5:500], 3 * 600 + 5, 600),
                WordBlock(moved[:0], 0, 600),
                WordBlock(moved, 0, 600),
                WordBlock(moved.view(torch.uint8)[:, :7], 2, 9),
            ]
        )

    def reference(rows, columns):
        part = partial_of(
            words[rows, columns].contiguous().numpy(), name="w", dtype=name, shape=(37, 600),
            row_offset=rows.start, column_offset=columns.start,
        )  # fmt: skip
        return part.sum_a, part.sum_b

    found = sums(words)
    assert found[0] == reference(slice(3, 30), slice(5, 500))
    assert found[1] == (0, 0)
    assert found[2] == reference(slice(0, 37), slice(0, 600))
    changed = words.clone()
    changed[10, 100] ^= 1
    other = sums(changed)
    assert found[0] != other[0]
    assert found[2] != other[2]
    assert found[3] == other[3]
