"""The gate on the device: our vLLM and the trainer give every sampled token the same bits.

Both run in processes of their own, as in a run, on a small generated model; CUDA graphs and prefix
cache are on and the weights change between the steps. The controls: vLLM on its own ops, and a
trainer that scores at other weights, must both be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Sample, SampleRequest, TrainSample
from engines.gates.logprobs import compare_logprobs
from engines.rollout.group import RolloutGroup, engine_env
from engines.seeds import derive_seed
from engines.train.group import TrainerGroup, trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@dataclass
class Engines:
    """Started engines of one spec."""

    spec: RunSpec
    model: str
    cluster: Cluster
    engine: EngineHandle
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
    with Cluster("gpu-tests", num_cpus=3, object_store_mib=256) as cluster:
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
        yield Engines(spec, model, cluster, engine, rollout, trainer)


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
