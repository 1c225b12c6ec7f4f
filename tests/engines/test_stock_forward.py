"""The stock forward over a packed slot is transformers' own forward of each sequence."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from engines.contracts import TrainSample
from engines.train.fsdp2.model import build_model, share_forward
from engines.train.fsdp2.stock import stock_forward
from engines.train.slots import pack_slot
from model_specs.recipes.tiny_cpu import TINY_MODEL

TEMPERATURE = 0.7


@pytest.fixture
def model() -> torch.nn.Module:
    """The tiny architecture with weights from a fixed seed, float32."""
    torch.set_num_threads(1)
    built = build_model(TINY_MODEL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(0.0, 0.1, generator=generator)
    return built


def samples() -> list[TrainSample]:
    """Three sequences of unequal lengths."""
    return [
        TrainSample(
            request_id=str(n),
            prompt_token_ids=tuple(range(3, 3 + prompt)),
            token_ids=tuple(range(40, 40 + completion)),
        )
        for n, (prompt, completion) in enumerate(((4, 7), (9, 2), (1, 12)))
    ]


def test_each_token_is_scored_as_transformers_scores_it_alone(model: torch.nn.Module) -> None:
    stock = copy.deepcopy(model)
    stock_forward(stock, temperature=TEMPERATURE)
    slot = pack_slot(samples())
    logprobs, entropy = stock(slot)
    assert logprobs.shape == entropy.shape == (slot.num_tokens,)
    for sample, row, spread in zip(
        samples(), slot.split(logprobs), slot.split(entropy), strict=True
    ):
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        logits = type(stock).forward(stock, input_ids=ids, use_cache=False).logits[0]
        rows = torch.log_softmax(logits[len(sample.prompt_token_ids) - 1 : -1] / TEMPERATURE, -1)
        alone = rows.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(row, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(spread, -(rows.exp() * rows).sum(-1), rtol=0, atol=1e-5)


def test_a_forbidden_token_has_no_probability_and_no_gradient(model: torch.nn.Module) -> None:
    stock, shared = copy.deepcopy(model), copy.deepcopy(model)
    stock_forward(stock, temperature=TEMPERATURE)
    share_forward(shared, TINY_MODEL, temperature=TEMPERATURE)
    free = pack_slot(samples())
    for until in (4, 99):
        slot = pack_slot(
            [replace(one, forbidden_ids=(1, 2), forbidden_until=until) for one in samples()]
        )
        logprobs, entropy = stock(slot)
        torch.testing.assert_close(shared(slot)[0], logprobs, rtol=0, atol=1e-4)
        first = torch.cat([torch.arange(count) < until for count in slot.counts])
        assert torch.equal(stock(free)[0] < logprobs, first)
    (logprobs.sum() + entropy.sum()).backward()
    gradient = stock.get_submodule("lm_head").weight.grad
    assert not gradient[[1, 2]].any()
    stock(free)[0].sum().backward()
    assert gradient[[1, 2]].all()


def test_the_shared_ops_compute_the_same_function_and_other_bits(model: torch.nn.Module) -> None:
    stock, shared = copy.deepcopy(model), copy.deepcopy(model)
    stock_forward(stock, temperature=TEMPERATURE)
    share_forward(shared, TINY_MODEL, temperature=TEMPERATURE)
    slot = pack_slot(samples())
    ours, theirs = shared(slot)[0], stock(slot)[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert not torch.equal(ours, theirs)


def test_every_parameter_is_given_a_gradient(model: torch.nn.Module) -> None:
    stock_forward(model, temperature=TEMPERATURE)
    logprobs, _ = model(pack_slot(samples()))
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
