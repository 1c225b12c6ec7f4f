"""GRPO's loss as one float32 expression a token, and its figures in a fixed order.

Invariants: a token's terms depend on that token alone; the denominators are constants of the whole
update, known before any rank begins; sums over tokens and samples are exactly rounded. So neither
packing nor the number of ranks can be seen in the loss, its gradient or a metric.

The *old* log-probs are the trainer's own score at the sampling weights. In aligned mode the
rollout's log-probs never enter: there is no mismatch to correct, and what differs is a bug that the
gate must show. Under the stock numerics they may, as the behaviour policy of `loss.tis_clip`.

Usage::

    totals = UpdateTotals.of(samples)
    terms = token_terms(
        logprobs, entropy, old=old, advantages=advantages, reference=None, loss=spec.loss
    )
    slot_loss(terms, torch.tensor([totals.weight(sample, spec.loss)])).backward()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from engines import numerics
from engines.contracts import TrainSample
from engines.train.advantages import round_to_float32
from model_specs.errors import EngineError
from model_specs.run_spec import LossSpec

K3_LIMIT = 10.0
"""k3 is clamped to [-10, 10], as verl and slime do: beyond it the gradient of a token is zero."""

METRICS = ("loss", "pg_loss", "kl", "ppo_kl", "pg_clipfrac", "entropy")
"""Per-token quantities that are aggregated as the loss is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTotals:
    """Denominators of one update: masked samples do not count."""

    num_tokens: int
    num_samples: int

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> UpdateTotals:
        """Count all samples of an update, whichever rank they go to."""
        kept = [sample for sample in samples if not sample.masked]
        return cls(num_tokens=sum(len(s.token_ids) for s in kept), num_samples=len(kept))

    def weight(self, sample: TrainSample, loss: LossSpec) -> float:
        """Return the factor (float32 value) of each token of `sample` in the update's loss.

        `per_token`: 1 / tokens of the update. `per_sample`: 1 / (samples of the update * tokens of
        this sample). Zero for a masked sample.
        """
        if sample.masked:
            return 0.0
        if loss.aggregation == "per_token":
            return round_to_float32(1 / self.num_tokens)
        return round_to_float32(1 / (self.num_samples * len(sample.token_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Per-token quantities, float32 [T]; only `loss` carries a gradient."""

    loss: torch.Tensor
    pg_loss: torch.Tensor
    kl: torch.Tensor
    ppo_kl: torch.Tensor
    pg_clipfrac: torch.Tensor
    entropy: torch.Tensor
    ratio: torch.Tensor

    def part(self, start: int, stop: int) -> TokenTerms:
        """Return the terms of tokens [start, stop)."""
        return TokenTerms(
            **{field.name: getattr(self, field.name)[start:stop] for field in fields(self)}
        )


def token_terms(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    old: torch.Tensor,
    advantages: torch.Tensor,
    reference: torch.Tensor | None,
    loss: LossSpec,
    behaviour: torch.Tensor | None = None,
) -> TokenTerms:
    """Return the loss of each token and what it is made of.

    With r = exp(lp - old), advantage A, and clip bounds l = `clip_low`, h = `clip_high`:

        pg   = max(-A r, -A min(max(r, 1 - l), 1 + h))
        loss = pg + kl_coef * kl - entropy_coef * entropy

    pg is the clipped objective of GRPO (arXiv 2402.03300, equation 3) with DAPO's separate upper
    bound (arXiv 2503.14476, equation 8). kl estimates KL(policy || reference) from d = lp - ref:
    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, clamped to [-10, 10] (Schulman 2020; GRPO's
    equation 4 is k3). Without a reference kl is zero. With a behaviour policy b, pg is multiplied
    by the constant min(exp(old - b), `tis_clip`): truncated importance sampling (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training").

    Args:
        logprobs: lp, float32 [T], of the chosen tokens at the current weights.
        entropy: float32 [T], of the distribution each token was drawn from.
        old: float32 [T], scored at the sampling weights.
        advantages: float32 [T], the sample's advantage repeated for its tokens.
        reference: float32 [T], scored at the reference weights, or None.
        loss: Clip bounds, coefficients and the kind of KL.
        behaviour: float32 [T], the rollout's log-probs, or None for no correction.

    Raises:
        EngineError: A behaviour policy is given and `loss.tis_clip` is not, or the reverse.
    """
    if (behaviour is None) != (loss.tis_clip is None):
        raise EngineError(
            f"loss.tis_clip={loss.tis_clip}, but the rollout's log-probs are "
            f"{'missing' if behaviour is None else 'given'}; they enter the loss with it alone"
        )
    log_ratio = logprobs - old
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    is_clipped = clipped > unclipped
    # `where`, not `max`: at a tie, which every first update is, max would split the gradient.
    policy = torch.where(is_clipped, clipped, unclipped)
    if behaviour is not None:
        policy = policy * torch.exp(old - behaviour).clamp(max=loss.tis_clip)
    total = policy
    divergence = torch.zeros_like(logprobs)
    if reference is not None:
        divergence = _divergence(logprobs - reference, loss)
        if loss.kl_coef:
            total = total + loss.kl_coef * divergence
    if loss.entropy_coef:
        total = total - loss.entropy_coef * entropy
    return TokenTerms(
        loss=total,
        pg_loss=policy.detach(),
        kl=divergence.detach(),
        ppo_kl=-log_ratio.detach(),
        pg_clipfrac=is_clipped.to(torch.float32),
        entropy=entropy.detach(),
        ratio=ratio.detach(),
    )


def _divergence(difference: torch.Tensor, loss: LossSpec) -> torch.Tensor:
    if loss.kl_type == "k1":
        return difference
    if loss.kl_type == "k2":
        return difference * difference * 0.5
    return (torch.exp(-difference) - 1 + difference).clamp(-K3_LIMIT, K3_LIMIT)


def slot_loss(terms: TokenTerms, weights: torch.Tensor) -> torch.Tensor:
    """Return the slot's part of the update's loss, a scalar to run backward from.

    Args:
        terms: Of the slot's T tokens.
        weights: float32 [T], `UpdateTotals.weight` repeated for each token of its sample.
    """
    return numerics.token_sum(terms.loss * weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFigures:
    """What one sample contributes to the update's figures."""

    request_id: str
    figures: dict[str, float]
    """`METRICS` name -> weight * exact sum over the sample's tokens (float64)."""
    max_ratio: float
    rescore_mismatches: int
    """Tokens whose training forward is not bitwise the scored log-prob."""


def sample_figures(
    request_id: str,
    terms: TokenTerms,
    *,
    weight: float,
    logprobs: torch.Tensor,
    old: torch.Tensor,
) -> SampleFigures:
    """Sum the terms of one sample's tokens; a masked sample (weight 0) contributes exact zeros."""
    figures = dict.fromkeys(METRICS, 0.0)
    max_ratio = 0.0
    if weight:
        for name in METRICS:
            figures[name] = weight * exact_sum(getattr(terms, name))
        max_ratio = float(terms.ratio.max())
    different = logprobs.detach().view(torch.int32) != old.view(torch.int32)
    return SampleFigures(
        request_id=request_id,
        figures=figures,
        max_ratio=max_ratio,
        rescore_mismatches=int(different.sum()),
    )


def exact_sum(values: torch.Tensor) -> float:
    """Return the exactly rounded float64 sum of a 1-D tensor; NaN if a value is not finite."""
    if not bool(torch.isfinite(values).all()):
        return math.nan
    return math.fsum(values.tolist())


def update_metrics(figures: Sequence[SampleFigures]) -> dict[str, float]:
    """Return `train/<name>` for all samples of an update, whatever their order.

    `train/ratio_max` is over all tokens that count; `train/rescore_mismatches` is the number of
    tokens whose log-prob in the training forward is not bitwise the scored one (zero at the
    sampling weights).
    """
    metrics = {
        f"train/{name}": math.fsum(figure.figures[name] for figure in figures) for name in METRICS
    }
    metrics["train/ratio_max"] = max(figure.max_ratio for figure in figures)
    metrics["train/rescore_mismatches"] = float(sum(f.rescore_mismatches for f in figures))
    return metrics
