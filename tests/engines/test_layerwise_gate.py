"""The layer-wise zero gate: a real vLLM against each trainer, and the comparison by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Sample, SampleRequest, TrainSample
from engines.gates.layerwise import (
    ROLLOUT_FILE,
    TRAINER_FILE,
    LayerwiseResult,
    compare_layers,
    write_states,
)
from engines.gates.logprobs import compare_logprobs
from engines.provenance.verdict import Verdict
from engines.rollout.group import engine_env
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from engines.weights.wire import pack
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec
from tests.engines.trainer_cases import (
    DTYPES,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    made_samples,
    make_spec,
    started,
    write_model,
)

FAMILIES = (QWEN2, LLAMA, QWEN3, QWEN3_MOE)
SHORT_SET = ((QWEN2, "bfloat16"), (QWEN3_MOE, "float32"))
"""What `make test` runs of all families and dtypes."""
PROMPTS = {"1/train-0/0": 3, "1/train-1/0": 40, "1/train-2/0": 70}
"""Request id -> prompt tokens: below, across and beyond a tile of 64 positions."""
NUM_LAYERS = 3
"""Of the states that no engine recorded."""


# The comparison by itself.


def states(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(NUM_LAYERS, prompt + 2, 8, generator=generator).to(dtype)
        for name, prompt in PROMPTS.items()
    }


def compared(
    folder: Path, rollout: dict[str, torch.Tensor], trainer: dict[str, torch.Tensor]
) -> LayerwiseResult:
    write_states(folder / ROLLOUT_FILE, rollout)
    write_states(folder / TRAINER_FILE, trainer)
    return compare_layers(folder, PROMPTS, num_layers=NUM_LAYERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_states_are_aligned_and_every_element_is_counted(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    result = compared(tmp_path, states(dtype), states(dtype))
    assert result.verdict is Verdict.ALIGNED
    assert result.num_elements == result.num_exact == 3 * 8 * (3 + 40 + 70 + 6)
    assert (result.num_prefill_positions, result.num_decode_positions) == (113, 6)
    assert (result.num_requests, result.num_layers) == (3, 3)
    assert result.reason.endswith(
        "of 3 layers equal, 113 prefill and 6 decode positions of 3 requests"
    )
    assert result.differing_layers == ()
    json.dumps(result.to_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_difference_is_of_the_earliest_layer_not_of_the_first_request(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    changed = states(dtype)
    changed["1/train-0/0"][2, 0, 0] += 1
    changed["1/train-2/0"][1, 71, 5] *= -1
    result = compared(tmp_path, states(dtype), changed)
    assert result.verdict is Verdict.MISALIGNED
    assert result.differing_layers == (1, 2)
    first = result.first
    assert first is not None
    assert (first.layer, first.request_id, first.position) == (1, "1/train-2/0", 71)
    assert (first.phase, first.channel) == ("decode", 5)
    assert first.rollout == float(states(dtype)["1/train-2/0"][1, 71, 5]) == -first.trainer
    assert "layer 1, 1/train-2/0 position 71 (decode) channel 5" in result.reason
    json.dumps(result.to_dict())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_equal(value: float, tmp_path: Path) -> None:
    both = states(torch.float32)
    both["1/train-1/0"][0, 7, 1] = value
    result = compared(tmp_path, both, {name: t.clone() for name, t in both.items()})
    assert result.verdict is Verdict.MISALIGNED
    assert result.first is not None
    assert (result.first.position, result.first.phase) == (7, "prefill")
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_zero_of_the_other_sign_is_a_difference(tmp_path: Path) -> None:
    zero, negative = states(torch.bfloat16), states(torch.bfloat16)
    zero["1/train-0/0"][0, 0, 0], negative["1/train-0/0"][0, 0, 0] = 0.0, -0.0
    assert compared(tmp_path, zero, negative).verdict is Verdict.MISALIGNED


def test_missing_requests_positions_and_layers_are_misaligned_by_name(tmp_path: Path) -> None:
    whole = states(torch.float32)
    without = {name: t for name, t in whole.items() if name != "1/train-1/0"}
    assert "1/train-1/0: trainer has no states" in compared(tmp_path, whole, without).reason
    shorter = whole | {"1/train-1/0": whole["1/train-1/0"][:, :-1]}
    result = compared(tmp_path, whole, shorter)
    assert result.verdict is Verdict.MISALIGNED
    assert "(3, 42, 8) [layers, positions, hidden], trainer float32 (3, 41, 8)" in (
        result.reason.replace("uint32", "float32")
    )
    fewer = whole | {"1/train-1/0": whole["1/train-1/0"][:2]}
    assert compared(tmp_path, whole, fewer).verdict is Verdict.MISALIGNED


@pytest.mark.parametrize("num_skipped", [1, 3])
def test_a_layer_that_both_sides_skip_is_misaligned_with_the_numbers_of_both(
    num_skipped: int, tmp_path: Path
) -> None:
    """In one request, which is not the last, or in all."""
    fewer = states(torch.float32)
    for name in [*PROMPTS][:num_skipped]:
        fewer[name] = fewer[name][1:]
    result = compared(tmp_path, fewer, dict(fewer))
    assert result.verdict is Verdict.MISALIGNED
    fault = "1/train-0/0: rollout recorded 2 layers and trainer 2, but the model has 3"
    assert result.reason.startswith(fault)
    assert result.reason.count("recorded") == num_skipped


def test_states_of_a_request_that_was_not_asked_for_are_misaligned(tmp_path: Path) -> None:
    whole = states(torch.float32)
    more = whole | {"1/train-9/0": whole["1/train-0/0"].clone()}
    result = compared(tmp_path, more, whole)
    assert result.verdict is Verdict.MISALIGNED
    assert result.reason == "1/train-9/0: rollout has states, but was not asked for it"
    both = compared(tmp_path, more, more)
    assert both.verdict is Verdict.MISALIGNED
    assert both.reason.count("was not asked for it") == 2


def test_without_decoded_positions_it_is_vacuous(tmp_path: Path) -> None:
    only_prompts = {name: t[:, : PROMPTS[name]] for name, t in states(torch.float32).items()}
    result = compared(tmp_path, only_prompts, dict(only_prompts))
    assert result.verdict is Verdict.VACUOUS
    assert "113 prefill and 0 decode" in result.reason


def test_a_file_that_was_not_written_is_an_error(tmp_path: Path) -> None:
    write_states(tmp_path / ROLLOUT_FILE, states(torch.float32))
    with pytest.raises(EngineError, match=r"trainer\.safetensors is missing"):
        compare_layers(tmp_path, PROMPTS, num_layers=NUM_LAYERS)


# Real engines.


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A vLLM engine on a tiny model, without weights until it is pushed some."""

    spec: RunSpec
    folder: Path
    handle: EngineHandle

    def push(self, trainer: GrpoTrainer) -> None:
        buckets = list(pack(trainer.wire_tensors(), bucket_mib=1))
        gather([self.handle.call("receive", buckets, version=0)], what="receive")

    def draw(self, folder: Path) -> tuple[list[Sample], list[TrainSample]]:
        """Draw the prompts, record every layer, and return what was drawn for both sides."""
        requests = [
            SampleRequest(
                request_id=name,
                prompt_id=name.split("/")[1],
                sample_index=0,
                prompt_token_ids=tuple((7 * k + length) % 100 for k in range(length)),
                seed=length,
            )
            for name, length in PROMPTS.items()
        ]
        reference = self.handle.call("layer_states", requests, folder=str(folder))
        (samples,) = gather([reference], what="layer states")
        drawn = [
            TrainSample(
                request_id=sample.request_id,
                prompt_token_ids=sample.prompt_token_ids,
                token_ids=sample.token_ids,
            )
            for sample in samples
        ]
        assert sum(len(sample.token_ids) for sample in drawn) > 2 * len(drawn)
        return samples, drawn

    def compare(self, trainer: GrpoTrainer, folder: Path) -> LayerwiseResult:
        """Compare every layer, and every log-prob scored packed and one sequence at a time."""
        samples, drawn = self.draw(folder)
        trainer.layer_states(drawn, folder=str(folder))
        trainer.score(drawn)
        packed = compare_logprobs(0, samples, trainer.scores())
        alone = {}
        for sample in drawn:
            trainer.score([sample])
            alone |= trainer.scores()
        single = compare_logprobs(0, samples, alone)
        assert packed.aligned == single.aligned
        result = compare_layers(folder, PROMPTS, num_layers=self.spec.model.num_layers)
        assert packed.aligned == (result.verdict is Verdict.ALIGNED), packed
        return result


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("test-layerwise", num_cpus=2, object_store_mib=100) as started_cluster:
        yield started_cluster


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (model, dtype),
            id=f"{model.family}-{dtype}",
            marks=() if (model, dtype) in SHORT_SET else pytest.mark.exhaustive,
        )
        for model in FAMILIES
        for dtype in DTYPES
    ],
)
def rollout(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rollout]:
    """vLLM on one family and dtype, started with dummy weights."""
    model, dtype = request.param
    if model.family == "llama":  # vLLM's CPU attention takes no smaller head
        model = model.model_copy(update={"head_dim": 32})
    spec = make_spec(dtype, model=model)
    folder = write_model(tmp_path_factory.mktemp(model.family), model)
    handle = cluster.start(f"{model.family}-{dtype}", env=engine_env(spec))
    engine = "engines.rollout.vllm_engine:VllmEngine"
    started_engine = handle.actor.create.remote(engine, str(folder / "hf"), spec.model_dump_json())
    gather([started_engine], what="start", timeout_s=500)
    (facts,) = gather([handle.call("environment")], what="environment")
    assert facts["vllm_config"]["load_format"] == "dummy"
    yield Rollout(spec=spec, folder=folder, handle=handle)
    cluster.stop(handle)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_every_layer_and_log_prob_of_vllm_is_bitwise_that_of_the_trainer_over_three_updates(
    trainer: str, rollout: Rollout, tmp_path: Path
) -> None:
    spec = rollout.spec.model_copy(update={"trainer": trainer})
    with started(spec, rollout.folder, tmp_path) as running:
        for step in range(4):
            if step:
                samples = made_samples(seed=step)
                running.score(samples)
                running.update(samples, step=step, update=0)
            rollout.push(running)
            result = rollout.compare(running, tmp_path / str(step))
            assert result.verdict is Verdict.ALIGNED, (step, result.reason)
            assert result.num_layers == 2
            assert result.num_prefill_positions == sum(PROMPTS.values())
            assert result.num_exact == result.num_elements > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_one_element_of_one_weight_is_named_by_its_layer(
    trainer: str, rollout: Rollout, tmp_path: Path
) -> None:
    """The control: the trainer changes after the push, in the second layer alone."""
    spec = rollout.spec.model_copy(update={"trainer": trainer})
    expert = "experts.0." if spec.model.num_experts else ""
    with started(spec, rollout.folder, tmp_path) as running:
        rollout.push(running)
        running._shards[f"model.layers.1.mlp.{expert}down_proj.weight"].local[3, 5] += 0.5
        running._publish()
        result = rollout.compare(running, tmp_path / "changed")
    assert result.verdict is Verdict.MISALIGNED
    assert result.differing_layers == (1,)
    assert result.first is not None
    assert (result.first.layer, result.first.channel) == (1, 3)
    assert result.num_exact < result.num_elements
