"""The filter: prompts whose pass rate at the initial weights is neither too low nor too high.

Invariant: what is kept is a function of weights, data, sampling, reward and spec alone. Each draw's
seed is a hash of (root, "filter", prompt id, sample index), so that it has nothing in common with
a training draw; prompts are looked at and kept in data order, never in that of completion.

    chosen = candidates(prompts, spec.filter)
    requests = filter_requests(chosen, spec)
    rates = pass_rates(chosen, rewards, spec.filter)
    kept = kept_prompts(rates, spec.filter)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.contracts import Prompt, PromptSet, Sample, SampleRequest
from engines.provenance.digest import digest_json
from engines.rewards import as_float32
from engines.seeds import derive_seed
from model_specs.errors import DivergedError, SpecError
from model_specs.run_spec import FilterSpec, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """What was found of one prompt."""

    prompt_id: str
    num_passed: int
    num_samples: int
    mean_reward: float

    @property
    def rate(self) -> float:
        """Share of the samples that passed."""
        return self.num_passed / self.num_samples


def candidates(prompts: PromptSet, spec: FilterSpec) -> tuple[Prompt, ...]:
    """Return the prompts that are looked at: the first ones of the data."""
    return prompts.prompts[: spec.candidates]


def filter_requests(prompts: Sequence[Prompt], spec: RunSpec) -> tuple[SampleRequest, ...]:
    """One request a sample, prompt by prompt."""
    assert spec.filter is not None
    return tuple(
        SampleRequest(
            request_id=f"filter/{prompt.prompt_id}/{index}",
            prompt_id=prompt.prompt_id,
            sample_index=index,
            prompt_token_ids=prompt.token_ids,
            seed=derive_seed(spec.seeds.root, "filter", prompt.prompt_id, index),
        )
        for prompt in prompts
        for index in range(spec.filter.samples_per_prompt)
    )


def pass_rates(
    prompts: Sequence[Prompt], rewards: Sequence[float], spec: FilterSpec
) -> tuple[PassRate, ...]:
    """Return what was found of each prompt, in the order given, without a decision yet.

    Args:
        prompts: Candidates in data order.
        rewards: Of all samples, prompt by prompt, as `filter_requests` asks for them.
        spec: Gives the number of samples a prompt and the threshold.
    """
    size, threshold = spec.samples_per_prompt, as_float32(spec.threshold)
    groups = [rewards[first : first + size] for first in range(0, len(rewards), size)]
    return tuple(
        PassRate(
            prompt_id=prompt.prompt_id,
            num_passed=sum(reward >= threshold for reward in group),
            num_samples=len(group),
            mean_reward=sum(group) / len(group),
        )
        for prompt, group in zip(prompts, groups, strict=True)
    )


def kept_prompts(rates: Sequence[PassRate], spec: FilterSpec) -> tuple[str, ...]:
    """Return the ids of the first `max_prompts` prompts whose pass rate is in the band.

    Raises:
        SpecError: There is none.
    """
    inside = [rate.prompt_id for rate in rates if spec.low <= rate.rate <= spec.high]
    if not inside:
        found = sorted(rate.rate for rate in rates)
        raise SpecError(
            f"none of {len(rates)} prompts has a pass rate in [{spec.low}, {spec.high}] (reward at "
            f"least {spec.threshold}, {spec.samples_per_prompt} samples each); the rates found go "
            f"from {found[0]} to {found[-1]}; widen filter.low and filter.high, or change "
            "filter.threshold"
        )
    return tuple(inside[: spec.max_prompts])


def filter_digest(kept: Sequence[str], samples: Sequence[Sample], rewards: Sequence[float]) -> str:
    """Return a digest of what was kept and why: ids, tokens and rewards of all samples."""
    return digest_json(
        [
            list(kept),
            [[s.request_id, list(s.token_ids)] for s in samples],
            [reward.hex() for reward in rewards],
        ]
    )


def narrowed(prompts: PromptSet, kept: Sequence[str]) -> PromptSet:
    """Return the prompt set with these prompts alone, in the order of `kept`.

    Raises:
        SpecError: A kept id is no prompt of the data.
    """
    by_id: Mapping[str, Prompt] = {prompt.prompt_id: prompt for prompt in prompts.prompts}
    unknown = [name for name in kept if name not in by_id]
    if unknown:
        raise SpecError(
            f"filter.kept_ids names {unknown[0]!r} and {len(unknown) - 1} more that are no prompts "
            "of this data; run the filter again (`--set filter.kept_ids=[]`, "
            "`--set filter.kept_digest=null`)"
        )
    chosen = tuple(by_id[name] for name in kept)
    return PromptSet(
        prompts=chosen,
        num_dropped_too_long=prompts.num_dropped_too_long,
        digest=digest_json([[p.prompt_id, p.token_ids, p.label, p.metadata] for p in chosen]),
    )


def require_same(spec: FilterSpec, kept: Sequence[str], digest: str) -> None:
    """Require that the filter found again what the spec says it kept, where it says so.

    Raises:
        DivergedError: Ids or digest differ.
    """
    if spec.kept_digest is None or (spec.kept_digest, spec.kept_ids) == (digest, tuple(kept)):
        return
    only = sorted(set(spec.kept_ids) ^ set(kept))
    raise DivergedError(
        f"filter: {len(spec.kept_ids)} prompts were kept before (digest {spec.kept_digest}) and "
        f"{len(kept)} now ({digest}); "
        + (f"first that only one has: {only[0]}" if only else "the same prompts, other samples"),
        probe="prompts",
        name=only[0] if only else "",
    )
