"""Log-probs: the sampler's definition, row by row, with or without the head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.numerics import (
    Forbidden,
    chosen_logprobs,
    head_logprobs,
    linear,
    log_softmax_rows,
)

VOCABULARY, HIDDEN = 515, 48


def head_inputs(rows, dtype):
    hidden, weight = torch.randn(rows, HIDDEN).to(dtype), torch.randn(VOCABULARY, HIDDEN).to(dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (rows,))


def head_with_gradients(hidden, weight, ids, of_chosen, of_entropy, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    chosen, entropy = head_logprobs(*leaves, ids, temperature=0.7, **options)
    ((chosen * of_chosen).sum() + (entropy * of_entropy).sum()).backward()
    return [chosen.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad]


@pytest.mark.parametrize("vocabulary", [37, 515, 49152])
def test_log_softmax_rows_are_their_own(vocabulary, every_placing_agrees):
    every_placing_agrees(log_softmax_rows, torch.randn(200, vocabulary) * 4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.3])
def test_chosen_logprobs_are_what_a_sampler_reports(temperature, dtype, same_bits):
    logits, ids = torch.randn(33, VOCABULARY).to(dtype), torch.randint(0, VOCABULARY, (33,))
    sampled = logits.clone().to(torch.float32).div_(torch.full((33,), temperature).unsqueeze(1))
    sampled = sampled.log_softmax(dim=-1, dtype=torch.float32).gather(1, ids[:, None])[:, 0]
    assert same_bits(chosen_logprobs(logits, ids, temperature=temperature), sampled)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_all_tokens_together_have_probability_one_at_any_temperature(temperature, dtype):
    hidden, weight, _ = head_inputs(4, dtype)
    logits = linear(hidden, weight)
    every = [
        chosen_logprobs(logits, torch.full((4,), token), temperature=temperature)
        for token in range(VOCABULARY)
    ]
    found = torch.stack(every, 1)
    # Those of the whole vocabulary, once each: of any part of it, such as a top-k, less than one.
    assert (found <= 0).all()
    total = found.double().exp().sum(1)
    assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-5)
    expected = (logits.double() / temperature).log_softmax(1)
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-4)


def test_temperature_divides_as_float32_division(same_bits):
    logits = torch.randn(8, VOCABULARY)
    divided = torch.from_numpy(logits.numpy() / np.float32(0.7))
    ids = torch.zeros(8, dtype=torch.int64)
    expected = log_softmax_rows(divided)
    assert same_bits(chosen_logprobs(logits, ids, temperature=0.7), expected[:, 0])
    assert not same_bits(log_softmax_rows(logits * np.float32(1 / 0.7)), expected)


def test_gradient_of_chosen_logprobs_matches_float64(dtype, relative_error, tolerance):
    logits = torch.randn(33, VOCABULARY).to(dtype).requires_grad_()
    ids, upstream = torch.randint(0, VOCABULARY, (33,)), torch.randn(33)
    exact = logits.detach().double().requires_grad_()
    chosen_logprobs(logits, ids, temperature=0.7).backward(upstream)
    reference = (exact / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    reference.backward(upstream.double())
    assert logits.grad.dtype == dtype
    assert relative_error(logits.grad, exact.grad) < tolerance


def test_the_head_equals_logits_then_logprobs_bit_for_bit(dtype, same_bits):
    hidden, weight, ids = head_inputs(200, dtype)
    of_chosen = torch.randn(200)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
    chosen = chosen_logprobs(linear(*leaves), ids, temperature=0.7)
    chosen.backward(of_chosen)
    mine = head_with_gradients(hidden, weight, ids, of_chosen, torch.zeros(200))
    assert same_bits(mine[0], chosen.detach())
    assert same_bits(mine[2], leaves[0].grad)
    assert same_bits(mine[3], leaves[1].grad)


def test_chunk_size_and_threads_decide_no_bit(dtype, same_bits):
    hidden, weight, ids = head_inputs(300, dtype)
    weights = torch.randn(300), torch.randn(300)
    reference = head_with_gradients(hidden, weight, ids, *weights)
    for threads, chunk_rows in ((1, 128), (1, 320), (2, 64), (2, 1024)):
        torch.set_num_threads(threads)
        other = head_with_gradients(hidden, weight, ids, *weights, chunk_rows=chunk_rows)
        assert all(same_bits(a, b) for a, b in zip(other, reference, strict=True))


def test_head_rows_are_their_own(dtype, every_placing_agrees):
    hidden, weight, _ = head_inputs(256, dtype)

    def both(rows):
        ids = torch.zeros(len(rows), dtype=torch.int64)
        return torch.stack(head_logprobs(rows, weight, ids, temperature=0.7), 1)

    every_placing_agrees(both, hidden)


def test_entropy_of_a_lone_row_of_a_large_vocabulary_ignores_threads(same_bits):
    hidden, weight = torch.randn(1, 8), torch.randn(151_936, 8)
    ids = torch.zeros(1, dtype=torch.int64)
    one = head_logprobs(hidden, weight, ids, temperature=1.0)
    torch.set_num_threads(2)
    two = head_logprobs(hidden, weight, ids, temperature=1.0)
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))


def test_rows_without_gradient_change_none(dtype, same_bits):
    hidden, weight, ids = head_inputs(128, dtype)
    weights = [torch.randn(128), torch.randn(128)]
    alone = head_with_gradients(hidden, weight, ids, *weights)
    spread = [
        torch.cat((t[:64], torch.randn(64, *t.shape[1:]).to(t.dtype), t[64:])) for t in (hidden,)
    ]
    ids = torch.cat((ids[:64], ids[:64], ids[64:]))
    silent = [torch.cat((w[:64], torch.zeros(64), w[64:])) for w in weights]
    for chunk_rows in (64, 192):
        padded = head_with_gradients(spread[0], weight, ids, *silent, chunk_rows=chunk_rows)
        assert same_bits(padded[3], alone[3])
        assert not padded[2][64:128].any()


def test_values_and_gradients_match_float64(dtype, relative_error):
    hidden, weight, ids = head_inputs(100, dtype)
    hidden = hidden * 0.2
    weights = torch.randn(100), torch.randn(100)
    mine = head_with_gradients(hidden, weight, ids, *weights)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logprobs = (exact[0] @ exact[1].t() / 0.7).log_softmax(-1)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    ((chosen * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    reference = [chosen.detach(), entropy.detach(), exact[0].grad, exact[1].grad]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for value, target in zip(mine, reference, strict=True):
        assert relative_error(value, target) < tolerance


def forbidding(rows):
    """Two ids in every third row, and one more that no row is scored for, in all of them."""
    mask = torch.arange(rows) % 3 == 0
    return Forbidden(torch.tensor([0, 77]), mask), Forbidden(torch.tensor([9]), mask | True)


def masked_as_by_a_sampler(logits, forbidden):
    rows = forbidden.rows.nonzero()
    return logits.index_put((rows, forbidden.ids), torch.tensor(-torch.inf).to(logits))


def allowed_ids(rows):
    return torch.randint(100, VOCABULARY, (rows,))


@pytest.mark.parametrize("which", [0, 1])
def test_forbidden_tokens_are_minus_infinity_to_the_bit(dtype, same_bits, which):
    hidden, weight, _ = head_inputs(200, dtype)
    hidden, ids, forbidden = hidden * 0.1, allowed_ids(200), forbidding(200)[which]
    logits = masked_as_by_a_sampler(linear(hidden, weight).float(), forbidden)
    expected = log_softmax_rows(logits / torch.full((1, 1), 0.7)).gather(1, ids[:, None])[:, 0]
    for chunk_rows in (64, 128):
        options = {"temperature": 0.7, "chunk_rows": chunk_rows, "forbidden": forbidden}
        chosen, entropy = head_logprobs(hidden, weight, ids, **options)
        assert same_bits(chosen, expected)
        assert entropy.isfinite().all()
    free, _ = head_logprobs(hidden, weight, ids, temperature=0.7)
    assert same_bits(free[~forbidden.rows], expected[~forbidden.rows])
    assert (free[forbidden.rows] != expected[forbidden.rows]).double().mean() > 0.5


def test_minus_infinity_gives_a_large_vocabulary_the_same_bits(same_bits):
    logits = torch.randn(16, 49152) * 4
    finite, infinite = logits.clone(), logits.clone()
    finite[:, [0, 5, 49151]], infinite[:, [0, 5, 49151]] = -1e30, -torch.inf
    allowed = slice(6, 49151)
    found = log_softmax_rows(infinite)[:, allowed]
    assert same_bits(log_softmax_rows(finite)[:, allowed], found)
    assert not same_bits(log_softmax_rows(logits)[:, allowed], found)


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_beside_forbidden_tokens_match_float64(dtype, relative_error, which):
    hidden, weight, _ = head_inputs(100, dtype)
    hidden, ids, forbidden = hidden * 0.2, allowed_ids(100), forbidding(100)[which]
    weights = torch.randn(100), torch.randn(100)
    mine = head_with_gradients(hidden, weight, ids, *weights, forbidden=forbidden)
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = masked_as_by_a_sampler(exact[0] @ exact[1].t() / 0.7, forbidden)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs.clamp_min(-1e9)).sum(-1)
    ((chosen * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    reference = [chosen.detach(), entropy.detach(), exact[0].grad, exact[1].grad]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for value, target in zip(mine, reference, strict=True):
        assert relative_error(value, target) < tolerance
    if forbidden.rows.all():
        assert not mine[3][forbidden.ids].any()
        free = head_with_gradients(hidden, weight, ids, *weights)
        assert free[3][forbidden.ids].any()


def test_bad_arguments_are_refused():
    hidden, weight, ids = head_inputs(4, torch.float32)
    with pytest.raises(ValueError, match="chunk_rows is 100"):
        head_logprobs(hidden, weight, ids, temperature=1.0, chunk_rows=100)
    with pytest.raises(ValueError, match="temperature is 0"):
        head_logprobs(hidden, weight, ids, temperature=0)
    with pytest.raises(ValueError, match="bfloat16"):
        log_softmax_rows(hidden.bfloat16())
