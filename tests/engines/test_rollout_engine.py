"""The rollout engine on a real vLLM: a sample is a function of weights, prompt, seed and sampling.

Two models on the shared ops, `small` (Qwen2, float32, tied head, T = 1.0) and `wide` (Llama,
bfloat16, SmolLM2's width, untied, T = 0.6), and `native`, vLLM's own ops on the wide model as the
control. The trainer's forward runs in the test's own process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.checkpoint.tiny_model import write_tiny_model
from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Flip, Sample, SampleRequest, TrainSample
from engines.gates.controls import judge_native, judge_stock
from engines.gates.logprobs import compare_logprobs
from engines.provenance.tensor_digest import digest_tensor
from engines.rollout.group import RolloutGroup, engine_env
from engines.seeds import derive_seed
from engines.train.fsdp2.model import build_model, share_forward
from engines.train.slots import pack_slot
from engines.weights.names import EMBEDDING
from engines.weights.wire import pack
from model_specs.errors import EngineError, UnsupportedError
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

pytestmark = pytest.mark.slow

ENGINE = "engines.rollout.vllm_engine:VllmEngine"
STOCK = "engines.gates.controls:stock_logprobs"
END, OTHER_END = 3, 50
"""End-of-sequence ids: the tokenizer's, and one that only generation_config.json names."""

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A model folder, its spec, and the engine that runs it."""

    spec: RunSpec
    folder: str
    weights: Weights
    handle: EngineHandle

    def generate(self, requests: Sequence[SampleRequest], **sampling: Any) -> list[Sample]:
        chosen = self.spec.sampling.model_copy(update=sampling).model_dump_json()
        reference = self.handle.call("generate", list(requests), sampling=chosen)
        (samples,) = gather([reference], what="generate")
        return samples

    def push(self, weights: Weights, version: int = 0, **options: Any) -> Mapping[str, str]:
        buckets = list(pack(weights.items(), bucket_mib=1))
        reference = self.handle.call("receive", buckets, version=version, **options)
        (digests,) = gather([reference], what="receive")
        return digests

    def ask(self, method: str) -> Any:
        (answer,) = gather([self.handle.call(method)], what=method)
        return answer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("test-rollout", num_cpus=2, object_store_mib=100) as started:
        yield started


def _spec(*, dtype: str, temperature: float, **model: Any) -> RunSpec:
    spec = load_recipe("tiny_cpu")
    parts = {
        "model": spec.model.model_copy(update={"dtype": dtype, **model}),
        "numerics": spec.numerics.model_copy(update={"compute_dtype": dtype}),
        "sampling": spec.sampling.model_copy(update={"temperature": temperature}),
    }
    return RunSpec.model_validate(spec.model_copy(update=parts).model_dump())


def _folder(spec: RunSpec, folder: Path) -> str:
    write_tiny_model(folder, spec.model, seed=0)
    ends = {"eos_token_id": [END, OTHER_END], "temperature": 0.1, "top_k": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return str(folder)


def _start(cluster: Cluster, name: str, spec: RunSpec, folder: str) -> Rollout:
    handle = cluster.start(name, env=engine_env(spec))
    gather([handle.actor.create.remote(ENGINE, folder, spec.model_dump_json())], what=name)
    weights = load_file(f"{folder}/model.safetensors")
    return Rollout(spec=spec, folder=folder, weights=weights, handle=handle)


@pytest.fixture(scope="module")
def small(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    spec = _spec(dtype="float32", temperature=1.0)
    rollout = _start(cluster, "small", spec, _folder(spec, tmp_path_factory.mktemp("small")))
    with pytest.raises(EngineError, match="no weights have been pushed"):
        rollout.generate(_requests(1))
    rollout.push(rollout.weights)
    return rollout


@pytest.fixture(scope="module")
def wide(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Rollout:
    spec = _spec(
        dtype="bfloat16",
        temperature=0.6,
        family="llama",
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=False,
        qkv_bias=False,
    )
    rollout = _start(cluster, "wide", spec, _folder(spec, tmp_path_factory.mktemp("wide")))
    rollout.push(rollout.weights)
    return rollout


@pytest.fixture(scope="module")
def native(cluster: Cluster, wide: Rollout) -> Rollout:
    handle = cluster.start("native", env=engine_env(wide.spec, "native"))
    rollout = replace(wide, handle=handle)
    create = handle.actor.create.remote
    text = wide.spec.model_dump_json()
    with pytest.raises(EngineError, match="LOCKSTEP_NUMERICS is 'native' instead of 'aligned'"):
        gather([create(ENGINE, wide.folder, text)], what="native")
    for change, message in (
        ({"head_dim": 16}, "head_dim=16: vLLM's CPU attention takes"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
    ):
        folder = Path(wide.folder).with_name(f"refused-{next(iter(change))}")
        folder.mkdir()
        config = json.loads(Path(wide.folder, "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match=message):
            gather([create(ENGINE, str(folder), text, policy="native")], what="native")
    gather([create(ENGINE, wide.folder, text, policy="native")], what="native")
    return rollout


@pytest.fixture(params=["small", "wide"])
def rollout(request: pytest.FixtureRequest) -> Rollout:
    chosen: Rollout = request.getfixturevalue(request.param)
    return chosen


def _requests(count: int, *, step: int = 1) -> list[SampleRequest]:
    """Return requests of eight prompts of 3 to 87 tokens."""
    prompts = [tuple(4 + (5 * i + j) % 96 for j in range(3 + 12 * i)) for i in range(8)]
    return [
        SampleRequest(
            request_id=f"{step}/p-{i % 8}/{i // 8}",
            prompt_id=f"p-{i % 8}",
            sample_index=i // 8,
            prompt_token_ids=prompts[i % 8],
            seed=derive_seed(1, step, i),
        )
        for i in range(count)
    ]


def _trainer(rollout: Rollout, weights: Weights) -> Callable[[Sequence[Sample]], dict[str, Any]]:
    """Return the trainer's score of samples: its packed forward at these weights."""
    model = build_model(rollout.spec.model)
    model.load_state_dict(dict(weights), strict=False)
    model = model.to(getattr(torch, rollout.spec.numerics.compute_dtype))
    share_forward(model, rollout.spec.model, temperature=rollout.spec.sampling.temperature)

    def score(samples: Sequence[Sample]) -> dict[str, Any]:
        packed = pack_slot([TrainSample.of(sample) for sample in samples])
        with torch.no_grad():
            logprobs, _ = model(packed)
        return {
            name: tuple(values.tolist())
            for name, values in zip(packed.request_ids, packed.split(logprobs), strict=True)
        }

    return score


def _moved(weights: Weights) -> Weights:
    """Return weights after something like an update: every tensor differs."""
    return {
        name: (tensor.float() * 1.0625 + 0.01).to(tensor.dtype) for name, tensor in weights.items()
    }


def test_the_same_requests_twice_give_the_same_bits(rollout: Rollout) -> None:
    assert rollout.generate(_requests(16)) == rollout.generate(_requests(16))


def test_samples_of_one_prompt_differ_and_another_step_draws_others(small: Rollout) -> None:
    first = small.generate(_requests(16))
    assert first[0].token_ids != first[8].token_ids
    assert first[0].token_ids != small.generate(_requests(16, step=2))[0].token_ids


def test_no_batch_size_and_no_order_can_be_seen_in_a_sample(rollout: Rollout) -> None:
    requests = _requests(32)
    together = rollout.generate(requests)
    alone = [rollout.generate([request])[0] for request in requests[:8]]
    assert alone == together[:8]
    for size in (2, 3, 5, 17):
        assert rollout.generate(requests[:size]) == together[:size]
    assert rollout.generate(requests[::-1]) == together[::-1]


def test_preflight_is_green_and_hits_the_prefix_cache(rollout: Rollout) -> None:
    result = rollout.ask("preflight")
    assert result["verdict"] == "Aligned", result["reason"]
    *_, largest, cached, prefill = result["probes"]
    names = (largest["name"], cached["name"], prefill["name"])
    assert names == ("batch of 32", "prefix cache", "as prefill")
    assert cached["cached_tokens"] >= 64
    assert prefill["num_tokens"] >= 20
    assert sum(probe["num_tokens"] for probe in result["probes"]) >= 200


def test_the_trainer_scores_every_token_to_the_bit_over_three_pushes(rollout: Rollout) -> None:
    first, second = rollout.weights, _moved(rollout.weights)
    drawn = []
    for version, weights in enumerate((first, second, first), start=1):
        received = rollout.push(weights, version)
        assert received == {name: digest_tensor(name, value) for name, value in weights.items()}
        assert rollout.ask("weight_version") == str(version)
        samples = rollout.generate(_requests(16))
        gate = compare_logprobs(version, samples, _trainer(rollout, weights)(samples))
        assert gate.aligned, gate.violations()
        assert gate.num_tokens >= 200
        drawn.append(samples)
    assert drawn[0] == drawn[2]
    assert [s.logprobs for s in drawn[0]] != [s.logprobs for s in drawn[1]]
    stale = compare_logprobs(2, drawn[1], _trainer(rollout, first)(drawn[1]))
    assert not stale.aligned


def test_every_end_of_sequence_id_ends_a_completion_and_is_scored(small: Rollout) -> None:
    assert small.ask("environment")["stop_token_ids"] == [END, OTHER_END]
    samples = small.generate(_requests(32))
    stopped = [sample for sample in samples if sample.finish_reason == "stop"]
    assert {sample.token_ids[-1] for sample in stopped} == {END, OTHER_END}
    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids)
        inner = sample.token_ids[:-1] if sample in stopped else sample.token_ids
        assert not {END, OTHER_END} & set(inner)
        assert sample.stop_token == (sample.token_ids[-1] if sample in stopped else None)


def test_a_least_length_is_scored_as_it_was_drawn(small: Rollout) -> None:
    small.push(small.weights)
    requests = _requests(32)
    free = small.generate(requests)
    assert any(len(sample.token_ids) < 12 for sample in free)
    assert {(sample.forbidden_ids, sample.forbidden_until) for sample in free} == {((), 0)}
    samples = small.generate(requests, min_new_tokens=12)
    assert min(len(sample.token_ids) for sample in samples) >= 12
    assert any(sample.finish_reason == "stop" for sample in samples)
    assert {sample.forbidden_ids for sample in samples} == {(END, OTHER_END)}
    score = _trainer(small, small.weights)
    gate = compare_logprobs(1, samples, score(samples))
    assert gate.aligned, gate.violations()
    assert gate.max_abs_diff == 0.0
    band = small.spec.plan.gates.stock_band_float32
    stock = judge_stock(samples, _stock(small, samples), dtype="float32", band_float32=band)
    assert stock.holds, stock.reason
    # The control: the trainer's whole vocabulary, and the trainer's mask a token too long.
    blind = [replace(sample, forbidden_ids=(), forbidden_until=0) for sample in samples]
    assert not compare_logprobs(1, samples, score(blind)).aligned
    assert not judge_stock(samples, _stock(small, blind), dtype="float32", band_float32=band).holds
    longer = [replace(s, forbidden_until=13) for s in samples if len(s.token_ids) > 13]
    kept = [sample for sample in samples if len(sample.token_ids) > 13]
    off_by_one = compare_logprobs(1, kept, score(longer))
    assert not off_by_one.aligned
    assert off_by_one.num_tokens - off_by_one.num_exact <= len(kept)


def test_a_stop_string_ends_a_completion_and_its_tokens_stay(small: Rollout) -> None:
    free = small.generate(_requests(32))
    stopped = small.generate(_requests(32), stop=("a", "7"))
    by_string = [sample for sample in stopped if sample.stop_token in ("a", "7")]
    assert len(by_string) >= 5
    for sample, whole in zip(stopped, free, strict=True):
        assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
        assert sample.logprobs == whole.logprobs[: len(sample.token_ids)]
        assert not set(sample.text) & {"a", "7"}
    for sample in by_string:
        # Ids from 4 are characters; the string's own is in the ids but not in the text.
        assert len(sample.text) == sum(token >= 4 for token in sample.token_ids) - 1


def test_the_folders_generation_config_does_not_change_sampling(small: Rollout) -> None:
    # It says top_k = 2 and temperature = 0.1; drawn like that, samples would be nearly greedy.
    tokens = [token for sample in small.generate(_requests(32)) for token in sample.token_ids]
    assert len(set(tokens)) > 60
    assert small.ask("environment")["vllm_config"]["generation_config"] == "vllm"


def test_an_incomplete_or_foreign_push_is_refused_and_changes_nothing(small: Rollout) -> None:
    before = small.ask("received_digests")
    missing = {name: value for name, value in _moved(small.weights).items() if name != EMBEDDING}
    with pytest.raises(EngineError, match=f"missing: {EMBEDDING}"):
        small.push(missing)
    with pytest.raises(EngineError, match=r"unknown: lm_head\.weight"):
        small.push({**small.weights, "lm_head.weight": small.weights[EMBEDDING]})
    with pytest.raises(EngineError, match="are not float32"):
        small.push({name: value.bfloat16() for name, value in small.weights.items()})
    assert small.ask("received_digests") == before


def test_a_flipped_bit_of_the_storage_is_seen_and_kept(small: Rollout, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    sent = small.push(small.weights)
    flip = Flip(step=0, probe="received", name=name, element=5, bit=20)
    flipped = small.push(small.weights, flip=flip, keep_to=str(tmp_path))
    assert {key for key in sent if sent[key] != flipped[key]} == {name}
    kept = load_file(tmp_path / "received.safetensors")
    assert {key: digest_tensor(key, value) for key, value in kept.items()} == flipped
    changed = (kept[name] != small.weights[name]).nonzero()
    assert changed.tolist() == [[0, 5]]
    samples = small.generate(_requests(16))
    assert not compare_logprobs(0, samples, _trainer(small, small.weights)(samples)).aligned
    assert small.push(small.weights) == sent


def test_two_engines_in_any_order_are_one(cluster: Cluster, small: Rollout) -> None:
    second = _start(cluster, "second", small.spec, small.folder)
    execution = small.spec.execution.model_copy(update={"request_order_seed": 5})
    shuffled = small.spec.model_copy(update={"execution": execution})
    pair = RolloutGroup([small.handle, second.handle], shuffled)
    one = RolloutGroup([small.handle], small.spec)
    buckets = list(pack(small.weights.items(), bucket_mib=64))
    assert pair.receive(buckets, version=4) == one.receive(buckets, version=4)
    requests = _requests(21)
    assert pair.generate(requests) == one.generate(requests)
    second.push(_moved(small.weights), 5)
    assert pair.generate(requests) != one.generate(requests)
    with pytest.raises(EngineError, match="request ids must be unique"):
        one.generate([requests[0], requests[0]])
    cluster.stop(second.handle)


def test_a_prompt_without_room_for_its_completion_is_refused(small: Rollout) -> None:
    long = replace(_requests(1)[0], prompt_token_ids=(7,) * 100)
    with pytest.raises(
        EngineError, match=r"100 prompt tokens and sampling\.max_new_tokens=24 exceed"
    ):
        small.generate([long])


def test_the_environment_is_what_the_process_really_has(small: Rollout) -> None:
    facts = small.ask("environment")
    settings = facts["vllm_config"]
    assert facts["threads"] == small.spec.execution.threads
    assert facts["tied"] == {"lm_head.weight": EMBEDDING}
    replaced = {text.split(" -> ")[0] for text in facts["shared_ops"]}
    assert replaced >= {
        "RMSNorm",
        "SiluAndMul",
        "RotaryEmbedding",
        "dispatch_cpu_unquantized_gemm",
        "CPU_ATTN",
        "Sampler.compute_logprobs",
        "TopKTopPSampler.forward_cpu",
    }
    assert settings["attention"] == ["SharedAttentionImpl"]
    assert settings["load_format"] == "dummy"
    assert settings["prefix_caching"] is True
    assert settings["eager"] is True
    assert settings["chunked_prefill"] is False
    assert settings["logprobs_mode"] == "processed_logprobs"


def _stock(rollout: Rollout, samples: Sequence[Sample]) -> Mapping[str, list[float]]:
    reference = rollout.handle.run(
        STOCK,
        rollout.folder,
        list(samples),
        temperature=rollout.spec.sampling.temperature,
        dtype=rollout.spec.numerics.compute_dtype,
    )
    (scores,) = gather([reference], what="stock")
    return scores


def test_our_ops_are_near_stock_transformers_in_float32(small: Rollout) -> None:
    small.push(small.weights)
    samples = small.generate(_requests(16))
    band = small.spec.plan.gates.stock_band_float32
    result = judge_stock(samples, _stock(small, samples), dtype="float32", band_float32=band)
    assert result.holds, result.reason
    wrong = {name: [value + 1e-3 for value in s] for name, s in _stock(small, samples).items()}
    assert not judge_stock(samples, wrong, dtype="float32", band_float32=band).holds


def test_native_ops_turn_gate_and_preflight_red(native: Rollout) -> None:
    result = native.ask("preflight")
    # Seen on an AMD of family 23: with AVX2 alone native ops see no company at these sizes. That a
    # probe goes red there too is tested by the drill.
    may_hold = torch.backends.cpu.get_cpu_capability() == "AVX2"
    assert result["verdict"] == "Misaligned" or may_hold, result["reason"]
    facts = native.ask("environment")
    assert facts["shared_ops"] == []
    assert facts["vllm_config"]["load_format"] == "auto"
    samples = native.generate(_requests(16))
    control = judge_native(samples, _trainer(native, native.weights)(samples))
    assert control.holds, control.reason
    itself = {sample.request_id: sample.logprobs for sample in samples}
    assert not judge_native(samples, itself).holds
    with pytest.raises(UnsupportedError, match="packs its weights"):
        native.push(native.weights)


def test_our_ops_are_as_near_stock_transformers_as_native_vllm(
    wide: Rollout, native: Rollout
) -> None:
    wide.push(wide.weights)
    samples, others = wide.generate(_requests(32)), native.generate(_requests(32))
    beside = (others, _stock(native, others))
    stock = _stock(wide, samples)
    result = judge_stock(samples, stock, dtype="bfloat16", band_float32=1e-5, native=beside)
    assert result.holds, result.reason
    assert result.bound is not None
    wrong = {name: [value + 2 * result.bound for value in s] for name, s in stock.items()}
    assert not judge_stock(samples, wrong, dtype="bfloat16", band_float32=1e-5, native=beside).holds
