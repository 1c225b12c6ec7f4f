"""Every metric by name: what it is, and what other trainers call it.

Invariant: a run writes no metric that is not in this table (tests compare it with a real ledger).
Metrics are for looking: nothing is ever compared through them.

    METRICS["reward/mean"].meaning
    unknown_metrics(line.metrics)       # () unless the table lacks one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; a name of another trainer is empty where it has nothing of the kind."""

    meaning: str
    verl: str = ""
    trl: str = ""
    slime: str = ""


METRICS: Mapping[str, Metric] = {
    "reward/mean": Metric(
        meaning="mean reward of all drawn samples",
        verl="critic/score/mean",
        trl="reward",
        slime="rollout/raw_reward",
    ),
    "reward/std": Metric(meaning="standard deviation of the same, over all samples"),
    "reward/zero_std_groups": Metric(
        meaning="drawn groups whose rewards are all equal", trl="frac_reward_zero_std (a share)"
    ),
    "sampling/drawn_groups": Metric(meaning="`sampling.oversample` > 1: groups drawn"),
    "sampling/unused_groups": Metric(meaning="the same: drawn and not trained on"),
    "sampling/filled_groups": Metric(
        meaning="the same: trained on without reward variance, for want of others"
    ),
    "rollout/response_length/mean": Metric(
        meaning="tokens of a completion",
        verl="response_length/mean",
        trl="completions/mean_length",
        slime="rollout/response_len/mean",
    ),
    "rollout/response_length/max": Metric(
        meaning="tokens of the longest completion",
        verl="response_length/max",
        trl="completions/max_length",
        slime="rollout/response_len/max",
    ),
    "rollout/truncated_ratio": Metric(
        meaning="share of completions cut off at `sampling.max_new_tokens`",
        verl="response_length/clip_ratio",
        trl="completions/clipped_ratio",
        slime="rollout/truncated_ratio",
    ),
    "gate/logprob_abs_diff/max": Metric(
        meaning="largest absolute difference of a token's two log-probs, in nats",
        trl="sampling/sampling_logp_difference/max",
    ),
    "gate/logprob_abs_diff/mean": Metric(
        meaning="mean of the same",
        trl="sampling/sampling_logp_difference/mean",
        slime="train/train_rollout_logprob_abs_diff",
    ),
    "gate/logprob_abs_diff/p999": Metric(meaning="99.9th percentile of the same"),
    "gate/exact_fraction": Metric(meaning="share of tokens whose two log-probs have equal bits"),
    "gate/num_tokens": Metric(meaning="tokens that were compared"),
    "train/train_rollout_logprob_abs_diff": Metric(
        meaning="`gate/logprob_abs_diff/mean`, under the name that slime has",
        slime="train/train_rollout_logprob_abs_diff",
    ),
    "mismatch/abs_diff/mean": Metric(
        meaning="mean of abs(d), d = trainer's minus rollout's log-prob of a token, in nats",
        trl="sampling/sampling_logp_difference/mean",
        slime="train/train_rollout_logprob_abs_diff",
    ),
    "mismatch/abs_diff/max": Metric(
        meaning="largest abs(d)", trl="sampling/sampling_logp_difference/max"
    ),
    "mismatch/k1": Metric(
        meaning="mean of -d: estimates KL(rollout, trainer)", verl="rollout_corr/kl"
    ),
    "mismatch/k3": Metric(
        meaning="mean of exp(d) - 1 - d: estimates the same", verl="rollout_corr/k3_kl"
    ),
    "mismatch/ppl_ratio": Metric(
        meaning="trainer's perplexity of a sample to the rollout's, mean over samples",
        verl="rollout_corr/ppl_ratio",
    ),
    "mismatch/tis_weight/mean": Metric(
        meaning="`loss.tis_clip`: mean of min(exp(d), tis_clip)",
        verl="rollout_corr/rollout_is_mean",
        trl="sampling/importance_sampling_ratio/mean",
        slime="train/tis (before the cap)",
    ),
    "mismatch/tis_clip_fraction": Metric(
        meaning="`loss.tis_clip`: share of tokens that it caps", slime="train/tis_clipfrac"
    ),
    "train/loss": Metric(meaning="loss of the update", trl="loss", slime="train/loss"),
    "train/pg_loss": Metric(
        meaning="policy part of the loss", verl="actor/pg_loss", slime="train/pg_loss"
    ),
    "train/kl": Metric(
        meaning="estimate of KL(policy, reference); 0 without a reference",
        verl="actor/kl_loss",
        trl="kl",
        slime="train/kl_loss",
    ),
    "train/ppo_kl": Metric(
        meaning="mean of old minus current log-prob",
        verl="actor/ppo_kl",
        slime="train/ppo_kl",
    ),
    "train/pg_clipfrac": Metric(
        meaning="share of tokens whose ratio is clipped",
        verl="actor/pg_clipfrac",
        trl="clip_ratio/region_mean",
        slime="train/pg_clipfrac",
    ),
    "train/entropy": Metric(
        meaning="entropy of the distribution a token was drawn from, in nats",
        verl="actor/entropy",
        trl="entropy",
        slime="train/entropy_loss",
    ),
    "train/ratio_max": Metric(meaning="largest ratio of current to old probability of a token"),
    "train/rescore_mismatches": Metric(
        meaning="tokens whose training forward is not bitwise the score (0 when aligned)"
    ),
    "train/grad_norm": Metric(
        meaning="norm of the whole gradient, before the clip",
        verl="actor/grad_norm",
        trl="grad_norm",
        slime="train/grad_norm",
    ),
    "train/lr": Metric(
        meaning="learning rate", verl="actor/lr", trl="learning_rate", slime="train/lr-pg_0"
    ),
    "perf/generate_s": Metric(meaning="seconds of drawing", verl="timing_s/gen"),
    "perf/reward_s": Metric(meaning="seconds of rewards and advantages", verl="timing_s/reward"),
    "perf/score_s": Metric(meaning="seconds of the re-score", verl="timing_s/old_log_prob"),
    "perf/gate_s": Metric(meaning="seconds of the gate and of digesting what was drawn"),
    "perf/update_s": Metric(
        meaning="seconds of forward, backward, optimizer", verl="timing_s/update_actor"
    ),
    "perf/push_s": Metric(
        meaning="seconds of sending and receiving weights", verl="timing_s/update_weights"
    ),
    "perf/memory/trainer_awake_mib": Metric(
        meaning="`execution.sleep`: MiB in use before trainer rank 0 fell asleep; the GPU's, or "
        "the process's on CPU"
    ),
    "perf/memory/trainer_asleep_mib": Metric(meaning="the same, after it"),
    "perf/memory/rollout_awake_mib": Metric(meaning="the same, before engine 0 fell asleep"),
    "perf/memory/rollout_asleep_mib": Metric(meaning="the same, after it"),
    "perf/step_s": Metric(
        meaning="seconds since the step began", verl="timing_s/step", trl="step_time"
    ),
    "perf/eval_s": Metric(meaning="seconds of a step's evaluations; in metrics.jsonl only"),
    "perf/rollout_delays": Metric(
        meaning="random delays of all rollout engines, where asked for; in metrics.jsonl only"
    ),
    "perf/evidence_s": Metric(meaning="seconds of all that is evidence; in metrics.jsonl only"),
}
"""In the order of a step. `repro/*`, which a comparison writes, is described in its own words."""

COMPARISON_METRICS: Mapping[str, Metric] = {
    "repro/identical": Metric(
        meaning="twin, comparison: 1 for each common step before the first difference, then 0"
    ),
    "repro/max_ulp": Metric(
        meaning="twin, comparison: 0 for each equal step; at the first difference the largest "
        "distance in the differing tensor or sample, in units in the last place, where it is known"
    ),
}
"""Written to MLflow for the run as a whole."""

PREFIXES: Mapping[str, Metric] = {
    "eval/<set>/": Metric(
        meaning="figures of an evaluation set, such as `accuracy` with its `num`",
        verl="val-core/<set>/...",
        trl="eval_reward",
        slime="eval/<set>",
    ),
}
"""Families of names that a spec's own names are part of."""


def unknown_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that the table does not have, sorted."""
    heads = tuple(prefix.partition("<")[0] for prefix in PREFIXES)
    return tuple(
        sorted(
            name
            for name in names
            if name not in METRICS and name not in COMPARISON_METRICS and not name.startswith(heads)
        )
    )
