"""A mixture of experts through vLLM on the device: every sampled token has the trainer's bits.

As in `test_alignment.py`, whose helpers these are: CUDA graphs and prefix cache on, weights that
change, once with each trainer. The control scores at other weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.cluster import Cluster, gather
from engines.gates.logprobs import compare_logprobs
from engines.rollout.group import RolloutGroup, engine_env
from engines.train.group import TrainerGroup, trainer_env
from engines.train.registry import TRAINERS
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from tests.gpu.test_alignment import Engines, as_train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EXPERTS = {
    "num_experts": 8, "experts_per_token": 3, "intermediate_size": 96, "normalize_weights": True,
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(TRAINERS))
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder: Path = tmp_path_factory.mktemp("moe-alignment")
    spec = apply_overrides(
        load_recipe("tiny_cpu"),
        (
            "execution.device=cuda", "optimizer.lr=1e-3", "reduction.slots=4",
            "model.family=qwen3_moe", "model.qk_norm=true", "model.qkv_bias=false",
            f"model.moe={json.dumps(EXPERTS)}", f"trainer={request.param}",
        ),
    )  # fmt: skip
    model, masters = str(folder / "model"), str(folder / "dcp")
    with Cluster("gpu-moe-tests", num_cpus=2, object_store_mib=256) as cluster:
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


def test_every_log_prob_of_a_mixture_is_exact_while_the_weights_change(engines: Engines):
    for step in range(1, 4):
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
    engines.trainer.score(train)
    assert not compare_logprobs(5, samples, engines.trainer.scores()).aligned


def test_an_answer_of_a_mixture_is_the_same_alone_shuffled_and_after_a_prefix_hit(
    engines: Engines,
):
    engines.push(10)
    chosen = engines.requests(10)
    first = engines.rollout.generate(chosen)
    assert engines.rollout.generate(chosen) == first
    gather([engines.engine.call("reset_prefix_cache")], what="reset")
    assert engines.rollout.generate(chosen[::-1]) == first[::-1]
    gather([engines.engine.call("reset_prefix_cache")], what="reset")
    assert engines.rollout.generate(chosen[7:8]) == (first[7],)
    assert engines.rollout.preflight()["rollout-0"]["verdict"] == "Aligned"


def test_the_experts_are_ours(engines: Engines):
    facts = engines.rollout.environment()["rollout-0"]
    assert "UnquantizedFusedMoEMethod -> mix_experts" in facts["shared_ops"]
    assert "FusedTopKRouter -> route" in facts["shared_ops"]
    assert facts["vllm_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
