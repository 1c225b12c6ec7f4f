"""How far the policy that is trained is from the policy that sampled, as other trainers measure it.

Every run has these figures. Under the aligned numerics they are 0 and 1 exactly; under the stock
numerics they are what a correction such as truncated importance sampling has to deal with. With p
the rollout's log-prob of a sampled token and q the trainer's, in nats, both at the sampling
weights, and d = q - p:

| metric | definition | source |
| --- | --- | --- |
| `mismatch/abs_diff/mean`, `/max` | mean and maximum of abs(d) over tokens | |
| `mismatch/k1` | mean of -d: estimates KL(rollout, trainer), may be negative | Schulman 2020 |
| `mismatch/k3` | mean of exp(d) - 1 - d: estimates the same, never negative | Schulman 2020 |
| `mismatch/ppl_ratio` | mean over samples of exp(mean of -d over its tokens) | verl |
| `mismatch/tis_weight/mean` | mean of min(exp(d), C) over tokens | Yao et al. 2025 |
| `mismatch/tis_clip_fraction` | share of tokens with exp(d) > C | Yao et al. 2025 |

Schulman 2020 is "Approximating KL divergence"; verl's is the ratio of the trainer's perplexity to
the rollout's; Yao et al. 2025 is "Your efficient RL framework secretly brings you off-policy RL
training". The last two are there only with `loss.tis_clip`. Sums are exactly rounded, so the order
of samples cannot be seen.

    metrics = mismatch_metrics(samples, trainer.scores(), tis_clip=None)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engines.contracts import Sample
from engines.provenance.evidence_time import evidence


@evidence
def mismatch_metrics(
    samples: Sequence[Sample], scores: Mapping[str, Sequence[float]], *, tis_clip: float | None
) -> dict[str, float]:
    """Return the metrics of the module's table for one step.

    Args:
        samples: What the rollout drew and the trainer scored, with the rollout's log-probs.
        scores: Request id -> the trainer's log-prob of each sampled token. A sample without
            scores, or with another number of them, is left out: the gate names it.
        tis_clip: C of `loss.tis_clip`; None where no correction is made.

    Returns:
        No entry where no token can be compared; NaN where a log-prob is not finite.
    """
    per_sample = [
        [float(q) - float(p) for p, q in zip(sample.logprobs, scores[name], strict=True)]
        for sample in samples
        if (name := sample.request_id) in scores
        and len(scores[name]) == len(sample.logprobs)
        and sample.logprobs
    ]
    differences = [difference for row in per_sample for difference in row]
    if not differences:
        return {}
    names = ("abs_diff/mean", "abs_diff/max", "k1", "k3", "ppl_ratio")
    if not all(math.isfinite(difference) for difference in differences):
        return {f"mismatch/{name}": math.nan for name in names}
    count = len(differences)
    # 0.0 - x, not -x: an exact zero stays positive.
    metrics = {
        "mismatch/abs_diff/mean": math.fsum(map(abs, differences)) / count,
        "mismatch/abs_diff/max": max(map(abs, differences)),
        "mismatch/k1": math.fsum(0.0 - d for d in differences) / count,
        "mismatch/k3": math.fsum(_exp(d) - 1 - d for d in differences) / count,
        "mismatch/ppl_ratio": math.fsum(
            _exp(math.fsum(0.0 - d for d in row) / len(row)) for row in per_sample
        )
        / len(per_sample),
    }
    if tis_clip is not None:
        weights = [_exp(difference) for difference in differences]
        metrics |= {
            "mismatch/tis_weight/mean": math.fsum(min(w, tis_clip) for w in weights) / count,
            "mismatch/tis_clip_fraction": sum(w > tis_clip for w in weights) / count,
        }
    return metrics


def _exp(value: float) -> float:
    """Return e to the power of `value`; infinity where a float64 cannot hold it."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
