"""Mismatch metrics and truncated importance sampling, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from engines.contracts import Sample
from engines.gates.mismatch import mismatch_metrics
from engines.train.grpo import token_terms
from model_specs.errors import EngineError, SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import LossSpec

STOCK = (
    "numerics.policy=stock",
    "plan.gates.logprobs=report",
    "plan.gates.preflight=off",
    "plan.gates.layerwise=off",
    "plan.gates.controls=off",
)
LN2 = math.log(2)


def sample(name: str, *logprobs: float) -> Sample:
    """One completion with these log-probs of the rollout."""
    return Sample(
        request_id=name,
        prompt_id=name,
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=tuple(range(len(logprobs))),
        logprobs=logprobs,
        text="",
        finish_reason="stop",
    )


def test_equal_logprobs_give_exact_zeros_and_ones() -> None:
    metrics = mismatch_metrics(
        [sample("a", -1.5, -0.25), sample("b", -3.0)],
        {"a": (-1.5, -0.25), "b": (-3.0,)},
        tis_clip=2.0,
    )
    assert metrics == {
        "mismatch/abs_diff/mean": 0.0,
        "mismatch/abs_diff/max": 0.0,
        "mismatch/k1": 0.0,
        "mismatch/k3": 0.0,
        "mismatch/ppl_ratio": 1.0,
        "mismatch/tis_weight/mean": 1.0,
        "mismatch/tis_clip_fraction": 0.0,
    }
    assert math.copysign(1, metrics["mismatch/k1"]) == 1


def test_the_metrics_are_those_worked_out_by_hand() -> None:
    # Trainer to rollout: 2 and 1/2 in sample a, 4 in sample b.
    metrics = mismatch_metrics(
        [sample("a", -1.0, -1.0), sample("b", -2.0)],
        {"a": (-1.0 + LN2, -1.0 - LN2), "b": (-2.0 + 2 * LN2,)},
        tis_clip=3.0,
    )
    assert metrics["mismatch/abs_diff/max"] == pytest.approx(2 * LN2)
    assert metrics["mismatch/abs_diff/mean"] == pytest.approx(4 * LN2 / 3)
    assert metrics["mismatch/k1"] == pytest.approx(-2 * LN2 / 3)
    k3 = ((2 - 1 - LN2) + (0.5 - 1 + LN2) + (4 - 1 - 2 * LN2)) / 3
    assert metrics["mismatch/k3"] == pytest.approx(k3)
    # The trainer's perplexity is the rollout's in a, and a quarter of it in b.
    assert metrics["mismatch/ppl_ratio"] == pytest.approx((1 + 0.25) / 2)
    assert metrics["mismatch/tis_weight/mean"] == pytest.approx((2 + 0.5 + 3) / 3)
    assert metrics["mismatch/tis_clip_fraction"] == pytest.approx(1 / 3)


def test_the_order_of_samples_cannot_be_seen() -> None:
    samples = [sample(str(n), -0.1 * n, -0.3) for n in range(1, 9)]
    scores = {s.request_id: tuple(value + 0.01 / 3 for value in s.logprobs) for s in samples}
    forward = mismatch_metrics(samples, scores, tis_clip=None)
    assert forward == mismatch_metrics(samples[::-1], scores, tis_clip=None)
    assert "mismatch/tis_weight/mean" not in forward


def test_a_nan_shows_and_a_sample_that_was_not_scored_does_not_hide_the_others() -> None:
    found = mismatch_metrics([sample("a", math.nan)], {"a": (-1.0,)}, tis_clip=None)
    assert all(math.isnan(value) for value in found.values())
    found = mismatch_metrics([sample("a", -1.0), sample("b", -1.0)], {"b": (-2.0,)}, tis_clip=None)
    assert found["mismatch/abs_diff/max"] == 1.0
    assert mismatch_metrics([], {}, tis_clip=None) == {}


def terms(loss: LossSpec, behaviour: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of three tokens, at the sampling weights."""
    logprobs = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    found = token_terms(
        logprobs,
        torch.zeros(3),
        old=logprobs.detach().clone(),
        advantages=torch.tensor([1.0, -1.0, 2.0]),
        reference=None,
        loss=loss,
        behaviour=behaviour,
    )
    found.loss.sum().backward()
    assert logprobs.grad is not None
    return found.loss.detach(), logprobs.grad


def test_truncated_importance_sampling_weights_each_token_by_its_capped_ratio() -> None:
    # exp(old - rollout) is 2, 1/2 and 4; the last is capped at 3.
    behaviour = torch.tensor([-1.0 - LN2, -1.0 + LN2, -2.0 - 2 * LN2])
    loss, gradient = terms(LossSpec(tis_clip=3.0), behaviour)
    torch.testing.assert_close(loss, torch.tensor([-2.0, 0.5, -6.0]))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.5, -6.0]))
    plain, _ = terms(LossSpec(), None)
    torch.testing.assert_close(plain, torch.tensor([-1.0, 1.0, -2.0]))


def test_rollout_logprobs_enter_the_loss_with_tis_clip_alone() -> None:
    with pytest.raises(EngineError, match="rollout's log-probs are given"):
        terms(LossSpec(), torch.zeros(3))
    with pytest.raises(EngineError, match="rollout's log-probs are missing"):
        terms(LossSpec(tis_clip=2.0), None)


def test_a_correction_of_mismatch_is_refused_in_aligned_mode() -> None:
    tiny = load_recipe("tiny_cpu")
    with pytest.raises(SpecError, match=r"loss\.tis_clip=2\.0 corrects a mismatch"):
        apply_overrides(tiny, ("loss.tis_clip=2.0",))
    assert apply_overrides(tiny, (*STOCK, "loss.tis_clip=2.0")).loss.tis_clip == 2.0


@pytest.mark.parametrize("override", STOCK[1:])
def test_stock_numerics_refuse_a_gate_that_only_aligned_engines_can_pass(override: str) -> None:
    field = override.partition("=")[0]
    others = tuple(other for other in STOCK if other != override)
    with pytest.raises(SpecError, match=field):
        apply_overrides(load_recipe("tiny_cpu"), others)
