"""The probes against engines that are made up: a faithful one, and one for each way to fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from engines.contracts import Sample, SampleRequest
from engines.gates.preflight import NEW_TOKENS, run_probes
from engines.seeds import derive_seed
from model_specs.errors import EngineError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import EvalSampling

SPEC = apply_overrides(load_recipe("tiny_cpu"), ("execution.max_num_seqs=8",))


class MadeUpEngine:
    """Draws by a hash of what came before; `fault` says what else its log-probs depend on."""

    vocab_size, max_model_len = 100, 120

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.cached_tokens: dict[str, int] = {}
        self.largest = 0
        self._seen: set[str] = set()

    def generate(self, requests: Sequence[SampleRequest], *, sampling: str | None) -> list[Sample]:
        assert sampling is not None
        asked = EvalSampling.model_validate_json(sampling)
        self.new_tokens = asked.max_new_tokens
        assert all(
            len(r.prompt_token_ids) + self.new_tokens <= self.max_model_len for r in requests
        )
        self.largest = max(self.largest, len(requests))
        self.cached_tokens = {r.request_id: 16 * (r.request_id in self._seen) for r in requests}
        answers = [self._answer(r, len(requests), asked.temperature) for r in requests]
        self._seen |= {r.request_id for r in requests}
        return answers

    def _answer(self, request: SampleRequest, company: int, temperature: float) -> Sample:
        tokens, logprobs = list(request.prompt_token_ids), []
        for _ in range(self.new_tokens):
            tokens.append(derive_seed(request.seed, len(tokens), tokens[-1]) % self.vocab_size)
            value = logprob(tokens) / temperature
            if self.fault == "batch" and company == 8:
                value = math.nextafter(value, 0)
            if self.fault == "cache" and self.cached_tokens[request.request_id]:
                value = math.nextafter(value, 0)
            logprobs.append(value)
        return Sample(
            request_id=request.request_id,
            prompt_id=request.prompt_id,
            sample_index=0,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(tokens[-self.new_tokens :]),
            logprobs=tuple(logprobs),
            text="",
            finish_reason="length",
        )

    def prompt_logprobs(self, requests: Sequence[SampleRequest]) -> list[tuple[float, ...]]:
        rows = []
        for request in requests:
            tokens = request.prompt_token_ids
            assert len(tokens) < self.max_model_len
            row = [logprob(tokens[:end]) for end in range(2, len(tokens) + 1)]
            if self.fault == "prefill":
                row[-1] = math.nextafter(row[-1], 0)
            rows.append(tuple(row))
        return rows

    def reset_prefix_cache(self) -> None:
        self._seen.clear()


def logprob(tokens: Sequence[int]) -> float:
    """A log-prob of the last token that depends on all before it and on nothing else."""
    return -1 - derive_seed(0, *tokens) % 1000 / 997


def probed(fault: str = "", *overrides: str) -> tuple[dict[str, Any], MadeUpEngine]:
    engine = MadeUpEngine(fault)
    return run_probes(engine, apply_overrides(SPEC, overrides)), engine


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_faithful_engine_passes_every_probe_up_to_the_schedulers_limit(
    temperature: float,
) -> None:
    result, engine = probed("", f"sampling.temperature={temperature}")
    assert result["verdict"] == "Aligned", result["reason"]
    names = [probe["name"] for probe in result["probes"]]
    assert names == ["batch of 2", "batch of 4", "batch of 8", "prefix cache", "as prefill"]
    assert all(probe["num_tokens"] == probe["num_exact"] > 0 for probe in result["probes"])
    assert engine.largest == 8
    assert result["probes"][-1]["num_tokens"] == 4 * NEW_TOKENS


@pytest.mark.parametrize(
    ("fault", "probe"),
    [("batch", "batch of 8"), ("cache", "prefix cache"), ("prefill", "as prefill")],
)
def test_one_bit_in_one_setting_is_misaligned_and_the_setting_is_named(
    fault: str, probe: str
) -> None:
    result, _ = probed(fault)
    assert result["verdict"] == "Misaligned"
    assert f"1 of 5 probes differ from the requests alone; first: {probe}" in result["reason"]


@pytest.mark.parametrize("length", [3, 9, 17, 18, 19, 40])
def test_an_engine_for_short_sequences_is_probed_with_fewer_tokens(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeUpEngine, "max_model_len", length)
    result, engine = probed()
    assert engine.new_tokens == min(NEW_TOKENS, length - 2)
    assert result["verdict"] == "Aligned", result["reason"]
    assert probed("batch")[0]["verdict"] == "Misaligned"


def test_an_engine_for_two_tokens_cannot_be_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpEngine, "max_model_len", 2)
    with pytest.raises(EngineError, match="holds 2 tokens a sequence, a probe needs 3"):
        probed()
