"""Probes of a started rollout engine: does a request's answer depend on anything but the request?

Reading settings proves nothing, so the engine is asked. Four requests, the needles, are each drawn
alone; then together in batches of 2, 4, ... up to the scheduler's limit, spread among requests of
other lengths, at other places each time; then again with their prefixes in the cache. Every
log-prob must have the same bits as alone and every token must be the same. Last, what was drawn
is given back as a prompt: the log-probs that prefill computes must have the bits that decode gave.
Runs in the engine's process; takes seconds.

    result = run_probes(engine, spec)
    result["verdict"]    # Aligned, Misaligned, or Vacuous where nothing was probed
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from engines.contracts import Sample, SampleRequest
from engines.provenance.verdict import Verdict
from engines.seeds import derive_seed
from model_specs.errors import EngineError, UnsupportedError
from model_specs.run_spec import RunSpec

NUM_NEEDLES = 4
NEW_TOKENS = 16
"""Tokens drawn a request: one by prefill, the others by decode."""
MAX_NEEDLE_TOKENS: Mapping[str, int] = {"cpu": 200, "cuda": 1024}
"""By device: longest prompt of a needle, and of the requests around it below. On CUDA the largest
batches then hold more tokens than one forward takes, so that prompts are split."""
MAX_OTHER_TOKENS: Mapping[str, int] = {"cpu": 60, "cuda": 300}


class ProbedEngine(Protocol):
    """What the probes need of `engines.rollout.vllm_engine.VllmEngine`."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its completion."""

    @property
    def cached_tokens(self) -> Mapping[str, int]:
        """Request id -> prompt tokens that the last `generate` took from the prefix cache."""

    def generate(self, requests: Sequence[SampleRequest], *, sampling: str | None) -> list[Sample]:
        """Draw one sample a request."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""

    def prompt_logprobs(self, requests: Sequence[SampleRequest]) -> list[tuple[float, ...]]:
        """Log-prob at temperature 1 of each prompt token but the first, computed by prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The answers to the needles in one setting beside the answers to each alone."""

    name: str
    num_tokens: int
    """Tokens compared."""
    num_exact: int
    """Same token, and log-prob of the same bits."""
    max_abs_diff: float
    """Largest log-prob difference in nats over the positions that both answers have."""
    cached_tokens: int
    """Prompt tokens of the needles that came from the prefix cache."""


def run_probes(engine: ProbedEngine, spec: RunSpec) -> dict[str, Any]:
    """Probe an engine that holds weights; return verdict and figures as JSON values.

    Args:
        engine: Idle; its prefix cache is reset.
        spec: Gives temperature, the largest prompt and the largest batch.

    Returns:
        `verdict` (Aligned, Misaligned or Vacuous), `reason`, `seconds`, and `probes`, one mapping
        each with the fields of `Probe`.
    """
    started = time.monotonic()
    # A prompt has a token, and one that is only scored still draws one.
    new_tokens = min(NEW_TOKENS, engine.max_model_len - 2)
    if new_tokens < 1:
        raise EngineError(
            f"preflight: the engine holds {engine.max_model_len} tokens a sequence, a probe needs "
            "3; raise data.max_prompt_tokens or sampling.max_new_tokens"
        )
    asked = spec.sampling.model_copy(
        update={"max_new_tokens": new_tokens, "min_new_tokens": 0, "stop": ()}
    )
    sampling = asked.model_dump_json()
    room = engine.max_model_len - new_tokens - 1
    device = spec.execution.device
    longest = min(spec.data.max_prompt_tokens, room, MAX_NEEDLE_TOKENS[device])
    # Lengths from the longest down, so that tiles, pages and cache hits are all met partly filled.
    needles = [
        probe_request(
            f"preflight/needle/{index}", max(1, longest - index * (longest // 4 + 1)), engine
        )
        for index in range(NUM_NEEDLES)
    ]
    alone = _alone(engine, needles, sampling)
    probes = []
    for size in _ladder(spec.execution.max_num_seqs):
        engine.reset_prefix_cache()
        others = [
            probe_request(
                f"preflight/other/{index}",
                1 + (7 * index) % min(room, MAX_OTHER_TOKENS[device]),
                engine,
            )
            for index in range(size)
        ]
        batch = _spread(needles, others, size)
        probes.append(_probe(f"batch of {size}", engine, batch, alone, sampling))
    if not any(probe.cached_tokens for probe in probes):
        # Fills the cache where no batch did, then takes from it.
        engine.generate(needles, sampling=sampling)
    probes.append(_probe("prefix cache", engine, needles, alone, sampling))
    at_one = asked.model_copy(update={"temperature": 1.0}).model_dump_json()
    decoded = alone if asked.temperature == 1.0 else _alone(engine, needles, at_one)
    probes.append(_as_prefill(engine, decoded))
    verdict, reason = judge(probes)
    return {
        "verdict": verdict.value,
        "reason": reason,
        "seconds": time.monotonic() - started,
        "probes": [asdict(probe) for probe in probes],
    }


def _alone(engine: ProbedEngine, needles: Sequence[SampleRequest], sampling: str) -> list[Sample]:
    """Draw each needle by itself, without cached prefixes."""
    samples: list[Sample] = []
    for needle in needles:
        engine.reset_prefix_cache()
        samples += engine.generate([needle], sampling=sampling)
    return samples


def _as_prefill(engine: ProbedEngine, decoded: Sequence[Sample]) -> Probe:
    """Score prompt and answer of each needle as one prompt; decode must have given those bits."""
    whole = [
        SampleRequest(
            request_id=f"{sample.request_id}/prefill",
            prompt_id=sample.prompt_id,
            sample_index=0,
            prompt_token_ids=(*sample.prompt_token_ids, *sample.token_ids),
            seed=0,
        )
        for sample in decoded
    ]
    scored = engine.prompt_logprobs(whole)
    pairs = [
        (sample, replace(sample, logprobs=row[-len(sample.token_ids) :]))
        for sample, row in zip(decoded, scored, strict=True)
    ]
    return compare("as prefill", pairs, cached_tokens=0)


def _probe(
    name: str,
    engine: ProbedEngine,
    batch: Sequence[SampleRequest],
    alone: Sequence[Sample],
    sampling: str,
) -> Probe:
    answers = {answer.request_id: answer for answer in engine.generate(batch, sampling=sampling)}
    cached = sum(engine.cached_tokens.get(needle.request_id, 0) for needle in alone)
    pairs = [(one, answers[one.request_id]) for one in alone if one.request_id in answers]
    return compare(name, pairs, cached_tokens=cached)


def compare(name: str, pairs: Sequence[tuple[Sample, Sample]], *, cached_tokens: int) -> Probe:
    """Compare answers with the answers to the same requests alone; NaN is never exact."""
    num_tokens = num_exact = 0
    largest = 0.0
    for alone, answer in pairs:
        num_tokens += max(len(alone.token_ids), len(answer.token_ids))
        for position in range(min(len(alone.token_ids), len(answer.token_ids))):
            one, other = alone.logprobs[position], answer.logprobs[position]
            same_token = alone.token_ids[position] == answer.token_ids[position]
            num_exact += same_token and one.hex() == other.hex() and not math.isnan(one)
            largest = max(largest, abs(one - other))
    return Probe(
        name=name,
        num_tokens=num_tokens,
        num_exact=num_exact,
        max_abs_diff=largest,
        cached_tokens=cached_tokens,
    )


def judge(probes: Sequence[Probe]) -> tuple[Verdict, str]:
    """Return the verdict over all probes, and what broke first."""
    tokens = sum(probe.num_tokens for probe in probes)
    if not tokens:
        return Verdict.VACUOUS, "no token was compared"
    red = [probe for probe in probes if probe.num_exact != probe.num_tokens]
    if not red:
        return Verdict.ALIGNED, f"{tokens} tokens of {len(probes)} probes equal the requests alone"
    worst = max(red, key=lambda probe: probe.max_abs_diff)
    return Verdict.MISALIGNED, (
        f"{len(red)} of {len(probes)} probes differ from the requests alone; first: {red[0].name}; "
        f"worst: {worst.name}, {worst.num_tokens - worst.num_exact} of {worst.num_tokens} tokens, "
        f"max {worst.max_abs_diff!r}"
    )


def require_allowed(spec: RunSpec, verdict: Verdict, reason: str) -> None:
    """Require that the probes passed where the rollout attends by another op than the shared one.

    Raises:
        UnsupportedError: With what the probes found.
    """
    found = spec.numerics.rollout_attention
    if found != "shared" and not verdict.is_green:
        raise UnsupportedError(
            f"numerics.rollout_attention={found} does not give a request the same bits in every "
            f"company: {reason}; set numerics.rollout_attention=shared"
        )


def _spread(
    needles: Sequence[SampleRequest], others: Sequence[SampleRequest], size: int
) -> list[SampleRequest]:
    """Return a batch of `size` with as many needles as fit, evenly spread, turned by its size."""
    count = min(len(needles), size)
    places = {index * (size - 1) // max(1, count - 1): index for index in range(count)}
    turn = size.bit_length()
    return [
        needles[(places[place] + turn) % len(needles)] if place in places else others[place]
        for place in range(size)
    ]


def probe_request(request_id: str, length: int, engine: ProbedEngine) -> SampleRequest:
    """Return a request of `length` pseudo-random tokens that depend on its id alone."""
    tokens = tuple(
        derive_seed(0, request_id, position) % engine.vocab_size for position in range(length)
    )
    return SampleRequest(
        request_id=request_id,
        prompt_id=request_id,
        sample_index=0,
        prompt_token_ids=tokens,
        seed=derive_seed(0, request_id),
    )


def _ladder(limit: int) -> list[int]:
    """Return 2, 4, 8, ... below `limit`, and `limit`."""
    sizes = [2**power for power in range(1, limit.bit_length()) if 2**power < limit]
    return [*sizes, limit] if limit > 1 else sizes
