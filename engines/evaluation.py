"""Evaluations during training: what is drawn for a set of prompts, and what its metrics are.

Invariant: an evaluation is a function of the weights alone, and the training does not notice it.
Its seeds have labels of their own and do not name the step, so equal weights give equal figures;
its prompts are not the data cursor's; nothing of it enters a probe. Results are sorted by request
id, never by completion. Torch-free.

    requests = eval_requests(chosen, prompts, root=spec.seeds.root, step=4)
    samples = rollout.generate(requests, sampling=chosen.sampling)
    result = judge_eval(chosen, prompts, samples, spec.eval_reward(chosen))
    result.metrics                       # {"eval/test/accuracy": 0.5, "eval/test/num": 64.0, ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.contracts import Prompt, PromptSet, Sample, SampleRequest
from engines.provenance.digest import digest_json
from engines.rewards import as_float32, metadata_of, score_samples
from engines.seeds import derive_seed
from model_specs.run_spec import EvalSet, RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation of one set at the weights of one step."""

    metrics: Mapping[str, float]
    """`eval/<set>/...`."""
    digest: str
    """Over request ids, token ids, log-probs and rewards: equal exactly when all of these are."""
    rows: tuple[Mapping[str, Any], ...]
    """One a sample, sorted by request id."""


def eval_prompts(chosen: EvalSet, prompts: PromptSet) -> tuple[Prompt, ...]:
    """Return the prompts that are evaluated: the first `limit` in file order."""
    return prompts.prompts[: chosen.limit]


def eval_requests(
    chosen: EvalSet, prompts: Sequence[Prompt], *, root: int, step: int
) -> tuple[SampleRequest, ...]:
    """Return one request a sample, prompt by prompt, named `eval/<set>/<step>/<prompt>/<index>`."""
    return tuple(
        SampleRequest(
            request_id=f"eval/{chosen.name}/{step}/{prompt.prompt_id}/{index}",
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_token_ids=prompt.token_ids,
            seed=derive_seed(root, "eval", chosen.name, prompt.prompt_id, index),
        )
        for prompt in prompts
        for index in range(chosen.sampling.samples_per_prompt)
    )


def judge_eval(
    chosen: EvalSet, prompts: Sequence[Prompt], samples: Sequence[Sample], reward: RewardSpec
) -> EvalResult:
    """Reward the samples of an evaluation and return its figures.

    `accuracy` is the share of samples whose reward is `chosen.correct_at` or more (where that is
    None, `reward.high`), `num` the number of samples that it is a share of.

    Raises:
        EngineError, DivergedError: As `engines.rewards.score_samples`.
    """
    ordered = sorted(samples, key=lambda sample: sample.request_id)
    labels = {prompt.prompt_id: prompt.label for prompt in prompts}
    rewards = score_samples(ordered, labels, reward, metadata=metadata_of(prompts))
    threshold = as_float32(reward.high if chosen.correct_at is None else chosen.correct_at)
    lengths = [len(sample.token_ids) for sample in ordered]
    num = len(ordered)
    figures = {
        "accuracy": sum(value >= threshold for value in rewards) / num,
        "num": float(num),
        "reward_mean": math.fsum(rewards) / num,
        "response_length/mean": sum(lengths) / num,
        "truncated_ratio": sum(sample.finish_reason == "length" for sample in ordered) / num,
    }
    return EvalResult(
        metrics={f"eval/{chosen.name}/{name}": value for name, value in figures.items()},
        digest=digest_json(
            [
                [
                    _without_step(sample.request_id),
                    sample.token_ids,
                    [value.hex() for value in sample.logprobs],
                    value.hex(),
                ]
                for sample, value in zip(ordered, rewards, strict=True)
            ]
        ),
        rows=_rows(prompts, ordered, rewards),
    )


def _without_step(request_id: str) -> str:
    """Two evaluations of equal weights at different steps have one digest."""
    kind, name, _, rest = request_id.split("/", maxsplit=3)
    return f"{kind}/{name}/{rest}"


def _rows(
    prompts: Sequence[Prompt], samples: Sequence[Sample], rewards: Sequence[float]
) -> tuple[Mapping[str, Any], ...]:
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    return tuple(
        {
            "request_id": sample.request_id,
            "prompt_id": sample.prompt_id,
            "prompt": by_id[sample.prompt_id].text,
            "completion": sample.text,
            "label": by_id[sample.prompt_id].label,
            "reward": reward,
            "length": len(sample.token_ids),
            "finish_reason": sample.finish_reason,
        }
        for sample, reward in zip(samples, rewards, strict=True)
    )
