"""GRPO's loss against an independent float64 computation, and its figures in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engines.contracts import TrainSample
from engines.train.grpo import (
    UpdateTotals,
    sample_figures,
    slot_loss,
    token_terms,
    update_metrics,
)
from model_specs.run_spec import LossSpec

T = 40


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(T, generator=generator) * scale

    old = -draw(1.0).abs()
    return {
        "logprobs": old + draw(0.3),
        "entropy": draw(1.0).abs(),
        "old": old,
        "advantages": draw(1.0),
        "reference": old + draw(0.5),
    }


def plain_loss(values: dict[str, torch.Tensor], loss: LossSpec) -> torch.Tensor:
    """The published formulas, float64, token by token, written without tensors' help."""
    total = []
    for i in range(T):
        lp, old, ref = (values[name][i] for name in ("logprobs", "old", "reference"))
        advantage = values["advantages"][i]
        ratio = torch.exp(lp - old)
        bounded = min(max(ratio, ratio.new_tensor(1 - loss.clip_low)), 1 + loss.clip_high)
        policy = torch.maximum(-advantage * ratio, -advantage * bounded)
        kl = {
            "k1": lp - ref,
            "k2": (lp - ref) ** 2 / 2,
            "k3": torch.exp(ref - lp) - (ref - lp) - 1,
        }[loss.kl_type]
        total.append(policy + loss.kl_coef * kl - loss.entropy_coef * values["entropy"][i])
    return torch.stack(total)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (0.1, 0.02)])
def test_loss_and_gradient_match_float64_autograd(
    kl_type: str, coefficients: tuple[float, float]
) -> None:
    loss = LossSpec.model_validate(
        {
            "kl_type": kl_type,
            "kl_coef": coefficients[0],
            "entropy_coef": coefficients[1],
            "reference": True,
        }
    )
    values = inputs()
    exact = {name: value.double() for name, value in values.items()}
    for group in (values, exact):
        group["logprobs"].requires_grad_()
        group["entropy"].requires_grad_()
    terms = token_terms(
        values["logprobs"],
        values["entropy"],
        old=values["old"],
        advantages=values["advantages"],
        reference=values["reference"],
        loss=loss,
    )
    expected = plain_loss(exact, loss)
    torch.testing.assert_close(terms.loss.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(0.5, 1.5, T)
    slot_loss(terms, weights).backward()
    (expected * weights.double()).sum().backward()
    for name in ("logprobs", "entropy") if coefficients[1] else ("logprobs",):
        torch.testing.assert_close(
            values[name].grad.double(), exact[name].grad, rtol=2e-5, atol=1e-6
        )
    assert 0 < float(terms.pg_clipfrac.mean()) < 1


def test_one_token_by_hand() -> None:
    terms = token_terms(
        torch.tensor([math.log(0.5)]),
        torch.tensor([0.7]),
        old=torch.tensor([math.log(0.25)]),
        advantages=torch.tensor([2.0]),
        reference=torch.tensor([math.log(0.25)]),
        loss=LossSpec(clip_high=0.5, kl_coef=1.0, entropy_coef=0.1, reference=True),
    )
    assert float(terms.ratio) == pytest.approx(2.0, rel=1e-6)
    assert float(terms.pg_loss) == -3.0  # clipped at 1.5
    kl = 0.5 - 1 + math.log(2)
    assert float(terms.kl) == pytest.approx(kl, rel=1e-5)
    assert float(terms.loss) == pytest.approx(-3.0 + kl - 0.07, rel=1e-5)
    assert float(terms.pg_clipfrac) == 1.0


def test_at_the_sampling_weights_ratio_is_one_and_the_gradient_is_minus_advantage() -> None:
    values = inputs()
    logprobs = values["old"].clone().requires_grad_()
    terms = token_terms(
        logprobs,
        values["entropy"],
        old=values["old"],
        advantages=values["advantages"],
        reference=values["old"],
        loss=LossSpec(reference=True, kl_coef=0.3),
    )
    slot_loss(terms, torch.ones(T)).backward()
    assert torch.equal(terms.ppo_kl, torch.zeros(T))
    assert torch.equal(terms.kl, torch.zeros(T))
    assert torch.equal(terms.ratio, torch.ones(T))
    assert torch.equal(logprobs.grad, -values["advantages"])


def test_a_clipped_token_has_no_gradient_and_the_bounds_are_separate() -> None:
    logprobs = torch.log(torch.tensor([1.25, 1.25, 0.75, 0.75])).requires_grad_()
    terms = token_terms(
        logprobs,
        torch.zeros(4),
        old=torch.zeros(4),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        reference=None,
        loss=LossSpec(clip_low=0.2, clip_high=0.28),
    )
    slot_loss(terms, torch.ones(4)).backward()
    assert terms.pg_clipfrac.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert logprobs.grad[3] == 0
    assert (logprobs.grad[:3] != 0).all()


def test_k3_is_clamped_at_ten() -> None:
    terms = token_terms(
        torch.tensor([-30.0, -1.0]),
        torch.zeros(2),
        old=torch.zeros(2),
        advantages=torch.zeros(2),
        reference=torch.zeros(2),
        loss=LossSpec(reference=True),
    )
    assert terms.kl.tolist() == pytest.approx([10.0, math.e - 2], rel=1e-5)


def train_sample(name: str, tokens: int, *, masked: bool = False) -> TrainSample:
    return TrainSample(
        request_id=name, prompt_token_ids=(1,), token_ids=(2,) * tokens, masked=masked
    )


def test_denominators_are_of_the_whole_update_without_masked_samples() -> None:
    samples = [train_sample("a", 3), train_sample("b", 5), train_sample("c", 8, masked=True)]
    totals = UpdateTotals.of(samples)
    assert (totals.num_tokens, totals.num_samples) == (8, 2)
    per_token, per_sample = LossSpec(), LossSpec(aggregation="per_sample")
    assert [totals.weight(s, per_token) for s in samples] == [0.125, 0.125, 0.0]
    weights = [totals.weight(s, per_sample) for s in samples]
    assert weights == pytest.approx([1 / 6, 1 / 10, 0.0], rel=1e-6)


def test_figures_do_not_depend_on_the_order_of_samples_and_skip_masked_ones() -> None:
    values = inputs()
    terms = token_terms(
        values["logprobs"],
        values["entropy"],
        old=values["old"],
        advantages=values["advantages"],
        reference=values["reference"],
        loss=LossSpec(reference=True),
    )
    figures = [
        sample_figures(
            str(k),
            terms.part(k * 10, k * 10 + 10),
            weight=(0.0 if k == 3 else 1 / 30),
            logprobs=values["logprobs"][k * 10 : k * 10 + 10],
            old=values["old"][k * 10 : k * 10 + 10],
        )
        for k in range(4)
    ]
    metrics = update_metrics(figures)
    for seed in range(5):
        shuffled = list(figures)
        random.Random(seed).shuffle(shuffled)
        assert update_metrics(shuffled) == metrics
    assert metrics["train/kl"] == pytest.approx(float(terms.kl[:30].double().mean()), rel=1e-12)
    assert metrics["train/rescore_mismatches"] == 40.0
    assert metrics["train/ratio_max"] == float(terms.ratio[:30].max())
