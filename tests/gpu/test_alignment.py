"""The gate on the device: our vLLM and the trainer give every sampled token the same bits.

Both run in processes of their own, as in a run, on a small generated model; CUDA graphs and prefix
cache are on and the weights change between the steps. Every layer is compared too, and Megatron
with FSDP2. The controls: vLLM on its own ops, one of vLLM's own ops under the shared ones, and a
trainer that scores at other weights, must all be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Sample, SampleRequest, TrainSample
from engines.gates.layerwise import LayerwiseResult, compare_layers
from engines.gates.logprobs import compare_logprobs
from engines.provenance.verdict import Verdict
from engines.rollout.group import RolloutGroup, engine_env
from engines.seeds import derive_seed
from engines.train.group import TrainerGroup, trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tools.gpu import invariance
from tools.gpu.start import Started

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@dataclass
class Engines:
    """Started engines of one spec."""

    spec: RunSpec
    model: str
    cluster: Cluster
    engine: EngineHandle
    rank: EngineHandle
    rollout: RolloutGroup
    trainer: TrainerGroup

    def requests(self, step: int) -> list[SampleRequest]:
        """32 prompts of 1 to 63 tokens around the page size."""
        chosen = []
        for index in range(self.spec.samples_per_step):
            length = (15, 16, 17, 1, 63, 33, 48, 5)[index % 8]
            tokens = tuple(4 + derive_seed(0, index // 2, place) % 90 for place in range(length))
            chosen.append(
                SampleRequest(
                    request_id=f"{step}/{index}",
                    prompt_id=str(index // 2),
                    sample_index=index % 2,
                    prompt_token_ids=tokens,
                    seed=derive_seed(1, step, index),
                )
            )
        return chosen

    def push(self, version: int) -> None:
        """Send the trainer's weights; what arrives must be what was sent."""
        buckets, sent = self.trainer.send(version=version)
        assert self.rollout.receive(buckets, version=version) == sent


def started_trainer(engines: Engines, name: str, folder: Path) -> TrainerGroup:
    """Start another trainer on the same weights, in a process of its own."""
    spec = engines.spec.model_copy(update={"trainer": name})
    rank = engines.cluster.start(f"trainer-{name}", env=trainer_env(spec), num_cpus=1)
    trainer = TrainerGroup([rank], spec)
    masters = Path(engines.model).parent / "dcp"
    trainer.start(spec, dcp_dir=masters, rendezvous=f"file://{folder}/rendezvous-{name}")
    return trainer


def layers(
    engines: Engines, engine: EngineHandle, trainer: TrainerGroup, folder: Path
) -> LayerwiseResult:
    """Compare every layer of eight requests."""
    requests = engines.requests(30)[::4]
    (samples,) = gather(
        [engine.call("layer_states", requests, folder=str(folder))], what="layer states"
    )
    trainer.layer_states(as_train(tuple(samples)), folder=folder)
    lengths = {request.request_id: len(request.prompt_token_ids) for request in requests}
    return compare_layers(folder, lengths, num_layers=engines.spec.model.num_layers)


def as_train(samples: tuple[Sample, ...]) -> list[TrainSample]:
    return [
        TrainSample(
            request_id=sample.request_id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, sample in enumerate(samples)
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder: Path = tmp_path_factory.mktemp("alignment")
    spec = apply_overrides(
        load_recipe("tiny_cpu"), ("execution.device=cuda", "optimizer.lr=1e-3", "reduction.slots=4")
    )
    model, masters = str(folder / "model"), str(folder / "dcp")
    with Cluster("gpu-tests", num_cpus=8, object_store_mib=256) as cluster:
        engine = cluster.start("rollout-0", env=engine_env(spec), num_cpus=1)
        rank = cluster.start("trainer-0", env=trainer_env(spec), num_cpus=1)
        write = "engines.checkpoint.tiny_model:write_tiny_model"
        gather([rank.run(write, model, spec.model)], what="model")
        created = engine.actor.create.remote(
            "engines.rollout.vllm_engine:VllmEngine", model, spec.model_dump_json()
        )
        convert = "engines.checkpoint.convert:convert_hf_to_dcp"
        gather([rank.run(convert, model, masters, spec.model)], what="conversion")
        trainer = TrainerGroup([rank], spec)
        trainer.start(spec, dcp_dir=masters, rendezvous=f"file://{folder}/rendezvous")
        gather([created], what="start of the engine")
        rollout = RolloutGroup([engine], spec)
        yield Engines(spec, model, cluster, engine, rank, rollout, trainer)


def test_every_log_prob_is_exact_while_the_weights_change(engines: Engines):
    for step in range(1, 5):
        engines.push(step)
        samples = engines.rollout.generate(engines.requests(step))
        train = as_train(samples)
        engines.trainer.score(train)
        gate = compare_logprobs(step, samples, engines.trainer.scores())
        assert gate.aligned, gate
        assert gate.num_exact == gate.num_tokens > 300
        record = engines.trainer.update(train, step=step, update=0)
        assert record.metrics["train/grad_norm"] > 0
        assert record.changed_weights == len(engines.trainer.weight_digests())
    # The weights have moved on: the same samples are now scored differently, and the gate says so.
    engines.trainer.score(train)
    assert not compare_logprobs(5, samples, engines.trainer.scores()).aligned


def test_an_answer_is_the_same_alone_shuffled_and_after_a_prefix_hit(engines: Engines):
    engines.push(10)
    chosen = engines.requests(10)
    first = engines.rollout.generate(chosen)
    assert engines.rollout.generate(chosen) == first
    gather([engines.engine.call("reset_prefix_cache")], what="reset")
    assert engines.rollout.generate(chosen[::-1]) == first[::-1]
    for index in (0, 7):
        gather([engines.engine.call("reset_prefix_cache")], what="reset")
        assert engines.rollout.generate(chosen[index : index + 1]) == (first[index],)
    assert engines.rollout.preflight()["rollout-0"]["verdict"] == "Aligned"


def test_the_engine_runs_graphs_and_the_shared_attention(engines: Engines):
    facts = engines.rollout.environment()["rollout-0"]
    assert facts["vllm_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert facts["vllm_config"]["attention"] == ["SharedAttentionImpl"]
    assert facts["vllm_config"]["load_format"] == "dummy"
    assert facts["vllm_config"]["prefix_caching"] is True
    assert len(facts["shared_ops"]) == 10


def test_vllm_on_its_own_ops_is_told_apart(engines: Engines, tmp_path: Path):
    engines.trainer.load(Path(engines.model).parent / "dcp")
    native = engines.cluster.start("native-0", env=engine_env(engines.spec, "native"), num_cpus=1)
    created = native.actor.create.remote(
        "engines.rollout.vllm_engine:VllmEngine", engines.model, engines.spec.model_dump_json(),
        policy="native",
    )  # fmt: skip
    gather([created], what="start of the native engine")
    (answers,) = gather([native.call("generate", engines.requests(20))], what="native")
    engines.trainer.score(as_train(tuple(answers)))
    gate = compare_logprobs(20, answers, engines.trainer.scores())
    assert not gate.aligned
    assert 0 < gate.max_abs_diff < 0.5


def test_every_layer_is_bitwise_the_trainers_in_prefill_and_decode(
    engines: Engines, tmp_path: Path
):
    engines.push(30)
    result = layers(engines, engines.engine, engines.trainer, tmp_path)
    assert result.verdict is Verdict.ALIGNED, result.reason
    assert result.num_layers == 2
    assert result.num_prefill_positions > 100
    assert result.num_decode_positions > 20


def test_neither_order_nor_prefixes_nor_weights_that_came_and_went_can_be_seen(
    engines: Engines, tmp_path: Path
):
    masters = Path(engines.model).parent / "dcp"
    engines.trainer.load(masters)
    engines.trainer.connect(engines.rollout, rendezvous=tmp_path / "weights")
    report = invariance.check(
        Started(
            spec=engines.spec,
            model=engines.model,
            masters=masters,
            cluster=engines.cluster,
            engine=engines.engine,
            rank=engines.rank,
            rollout=engines.rollout,
            trainer=engines.trainer,
            start_s=0.0,
        ),
        repeats=5,
    )
    assert report["holds"], report
    assert report["orders"] == [32] * 5
    assert report["prefix_cached_tokens"] >= 16
    assert report["w2_is_w1"] < report["w1_again"] == report["w2_on_a_fresh_engine"] == 32


def test_one_of_vllms_own_ops_turns_the_gates_red_and_its_layer_is_named(
    engines: Engines, tmp_path: Path
):
    engine = engines.cluster.start("one-native-op", env=engine_env(engines.spec), num_cpus=1)
    (left,) = gather(
        [engine.run("tools.gpu.native_op:leave_native", "RotaryEmbedding")], what="native op"
    )
    assert left == ["RMSNorm", "SiluAndMul"]
    created = engine.actor.create.remote(
        "engines.rollout.vllm_engine:VllmEngine", engines.model, engines.spec.model_dump_json()
    )
    gather([created], what="start of the engine")
    buckets, sent = engines.trainer.send(version=40)
    rollout = RolloutGroup([engine], engines.spec)
    assert rollout.receive(buckets, version=40) == sent
    samples = rollout.generate(engines.requests(40))
    engines.trainer.score(as_train(samples))
    assert not compare_logprobs(40, samples, engines.trainer.scores()).aligned
    result = layers(engines, engine, engines.trainer, tmp_path)
    engines.cluster.stop(engine)
    assert result.verdict is Verdict.MISALIGNED
    assert result.first is not None
    assert result.first.layer == 0, result.reason


def test_megatron_has_every_bit_of_fsdp2_and_the_rollout_has_megatrons(
    engines: Engines, tmp_path: Path
):
    engines.trainer.load(Path(engines.model).parent / "dcp")
    megatron = started_trainer(engines, "megatron", tmp_path)
    for step in range(1, 4):
        buckets, sent = megatron.send(version=100 + step)
        assert engines.rollout.receive(buckets, version=100 + step) == sent
        samples = engines.rollout.generate(engines.requests(50 + step))
        train = as_train(samples)
        megatron.score(train)
        gate = compare_logprobs(step, samples, megatron.scores())
        assert gate.aligned, gate
        assert megatron.score(train) == engines.trainer.score(train)
        records = [t.update(train, step=step, update=0) for t in (engines.trainer, megatron)]
        assert records[0].digests == records[1].digests
        assert records[0].metrics == records[1].metrics
        assert records[0].metrics["train/grad_norm"] > 0
    assert megatron.state_digest() == engines.trainer.state_digest()
    buckets, _ = megatron.send(version=110)
    engines.rollout.receive(buckets, version=110)
    result = layers(engines, engines.engine, megatron, tmp_path / "layers")
    assert result.verdict is Verdict.ALIGNED, result.reason
    saved = megatron.save(
        tmp_path / "step-000003", chain_digest="c" * 32, attempt=1, run_folder=None
    )
    megatron.load(Path(engines.model).parent / "dcp")
    assert megatron.state_digest() != saved
    megatron.load(tmp_path / "step-000003")
    assert megatron.state_digest() == saved
