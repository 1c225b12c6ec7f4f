"""The trainer on one rank: step 0, packing, gradients against transformers, flips, sending."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.checkpoint.tiny_model import write_tiny_model
from engines.contracts import Flip, TrainSample
from engines.provenance.digest import digest_floats, root_digest
from engines.provenance.tensor_digest import digest_tensor
from engines.train.fsdp2.actor import Fsdp2Trainer
from engines.train.fsdp2.model import audit, model_config
from engines.train.fsdp2.sharding import gathered
from engines.train.slots import pack_slot
from engines.weights.wire import unpack
from model_specs.errors import EngineError, SpecError
from model_specs.model_spec import ModelSpec
from model_specs.recipes.tiny_cpu import TINY_MODEL
from model_specs.run_spec import (
    DataSpec,
    LossSpec,
    NumericsSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    TreeReduction,
)

QWEN2 = TINY_MODEL
LLAMA = QWEN2.model_copy(
    update={"family": "llama", "qkv_bias": False, "tie_word_embeddings": False, "head_dim": 16}
)
DTYPES = ("float32", "bfloat16")


def make_spec(
    dtype: str = "float32",
    *,
    model: ModelSpec = QWEN2,
    slots: int = 2,
    lr: float = 2e-3,
    **loss: Any,
) -> RunSpec:
    return RunSpec(
        recipe="test",
        model=model,
        data=DataSpec(source="generated:arithmetic", prompts_per_step=2, max_prompt_tokens=96),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=24, temperature=0.7),
        reward=RewardSpec(name="digits"),
        loss=LossSpec.model_validate({"reference": True, **loss}),
        optimizer=OptimizerSpec(lr=lr, weight_decay=0.0, clip_grad=100.0),
        reduction=TreeReduction(slots=slots),
        numerics=NumericsSpec.model_validate({"compute_dtype": dtype}),
        plan=PlanSpec(num_steps=4, checkpoint_every=2),
    )


def made_samples(count: int = 8, *, seed: int = 0) -> list[TrainSample]:
    draw = random.Random(seed)
    return [
        TrainSample(
            request_id=f"1/train-{i // 4}/{i % 4}",
            prompt_token_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(3, 90))),
            token_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(1, 25))),
            advantage=draw.randrange(-4, 5) / 4 or 0.5,
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    made = {}
    for model in (QWEN2, LLAMA):
        made[model.family] = tmp_path_factory.mktemp(model.family)
        write_tiny_model(made[model.family] / "hf", model)
        convert_hf_to_dcp(made[model.family] / "hf", made[model.family] / "dcp", model)
    return made


@pytest.fixture
def start(folders: dict[str, Path], tmp_path: Path) -> Any:
    """Return a context manager that starts a trainer and closes it."""
    count = iter(range(100))

    @contextmanager
    def started(spec: RunSpec) -> Iterator[Fsdp2Trainer]:
        trainer = Fsdp2Trainer(
            spec.model_dump_json(),
            dcp_dir=str(folders[spec.model.family] / "dcp"),
            rank=0,
            world_size=1,
            rendezvous=f"file://{tmp_path}/rendezvous-{next(count)}",
            threads=1,
        )
        try:
            yield trainer
        finally:
            trainer.close()

    return started


@pytest.mark.parametrize("dtype", DTYPES)
def test_at_step_zero_ratio_kl_and_reference_difference_are_exactly_zero_on_a_real_gradient(
    dtype: str, start: Any
) -> None:
    with start(make_spec(dtype)) as trainer:
        samples = made_samples()
        trainer.score(samples)
        assert trainer.scores() == trainer.reference_scores()
        record = trainer.update(samples, step=1, update=0)
    assert record.metrics["train/ppo_kl"] == 0.0
    assert record.metrics["train/kl"] == 0.0
    assert record.metrics["train/ratio_max"] == 1.0
    assert record.metrics["train/pg_clipfrac"] == 0.0
    assert record.metrics["train/rescore_mismatches"] == 0.0
    assert record.metrics["train/grad_norm"] > 0.01
    assert record.changed_weights == len(record.digests["weights"]) == 26


def test_after_an_update_ratio_and_kl_are_not_zero_any_more(start: Any) -> None:
    """The control of the test above."""
    with start(make_spec()) as trainer:
        samples = made_samples()
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        moved = trainer.update(samples, step=1, update=1)
        assert moved.metrics["train/ppo_kl"] != 0.0
        assert moved.metrics["train/kl"] > 0.0
        assert moved.metrics["train/rescore_mismatches"] > 0
        trainer.score(samples)
        assert trainer.scores() != trainer.reference_scores()


def test_score_root_is_the_digest_of_the_revealed_values(start: Any) -> None:
    with start(make_spec()) as trainer:
        root = trainer.score(made_samples())
        revealed = trainer.scores()
    assert root == root_digest({n: digest_floats(n, row) for n, row in revealed.items()})
    name, row = next(iter(revealed.items()))
    changed = {**revealed, name: (*row[:-1], row[-1] * 2)}
    assert root != root_digest({n: digest_floats(n, row) for n, row in changed.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_samples_score_as_one_at_a_time_and_with_or_without_gradient(
    dtype: str, start: Any
) -> None:
    samples = made_samples()
    with start(make_spec(dtype)) as trainer:
        packed = pack_slot(samples)
        with torch.no_grad():
            together = packed.split(trainer._model(packed)[0])
            alone = [trainer._model(pack_slot([sample]))[0] for sample in samples]
            backwards = pack_slot(samples[::-1])
            reversed_ = backwards.split(trainer._model(backwards)[0])[::-1]
        with_gradient = packed.split(trainer._model(packed)[0])
    for one, two, three, four in zip(together, alone, reversed_, with_gradient, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert torch.equal(one, four)


def test_number_of_slots_changes_no_score(start: Any) -> None:
    samples = made_samples()
    roots = []
    for slots in (1, 2, 8):
        with start(make_spec("bfloat16", slots=slots)) as trainer:
            roots.append(trainer.score(samples))
    assert len(set(roots)) == 1


def double_model(trainer: Fsdp2Trainer) -> torch.nn.Module:
    """Return transformers' own eager model in float64 at the trainer's current weights."""
    config = model_config(trainer.spec.model)
    config._attn_implementation = "eager"
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    state = {name: gathered(shard).double() for name, shard in trainer._shards.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


def plain_loss(
    model: torch.nn.Module,
    samples: list[TrainSample],
    trainer: Fsdp2Trainer,
) -> torch.Tensor:
    """GRPO's loss over transformers' forward, one sample at a time, in float64."""
    loss_spec, temperature = trainer.spec.loss, trainer.spec.sampling.temperature
    kept = [sample for sample in samples if not sample.masked]
    parts = []
    for sample in kept:
        ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
        logits = model(ids[None]).logits[0, len(sample.prompt_token_ids) - 1 : -1] / temperature
        logs = torch.log_softmax(logits, -1)
        lp = logs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        old = torch.tensor(trainer.scores()[sample.request_id], dtype=torch.float64)
        ref = torch.tensor(trainer.reference_scores()[sample.request_id], dtype=torch.float64)
        ratio = (lp - old).exp()
        clipped = ratio.clamp(1 - loss_spec.clip_low, 1 + loss_spec.clip_high)
        policy = torch.maximum(-sample.advantage * ratio, -sample.advantage * clipped)
        kl = (ref - lp).exp() - (ref - lp) - 1
        token = policy + loss_spec.kl_coef * kl - loss_spec.entropy_coef * entropy
        if loss_spec.aggregation == "per_token":
            parts.append(token.sum() / sum(len(s.token_ids) for s in kept))
        else:
            parts.append(token.mean() / len(kept))
    return torch.stack(parts).sum()


@pytest.mark.parametrize("model", [QWEN2, LLAMA], ids=lambda model: model.family)
@pytest.mark.parametrize("aggregation", ["per_token", "per_sample"])
def test_gradient_matches_unsharded_float64_transformers(
    model: ModelSpec, aggregation: str, start: Any
) -> None:
    loss_spec = {"kl_coef": 0.2, "entropy_coef": 0.05, "aggregation": aggregation}
    spec = make_spec(model=model, lr=2e-4, **loss_spec)  # k3 stays below its clamp
    samples = made_samples()
    samples[2] = TrainSample(
        request_id=samples[2].request_id,
        prompt_token_ids=samples[2].prompt_token_ids,
        token_ids=samples[2].token_ids,
        advantage=3.0,
        masked=True,
    )
    with start(spec) as trainer:
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)  # so that ratio and KL have left their zeros
        stock = double_model(trainer)
        expected = plain_loss(stock, samples, trainer)
        expected.backward()
        gradients, figures = trainer._gradients(samples)
        loss = sum(figure.figures["loss"] for figure in figures)
        clipped = sum(figure.figures["pg_clipfrac"] for figure in figures)
    assert 0.0 < clipped < 1.0
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    of_stock = dict(stock.named_parameters())
    assert set(gradients) == set(of_stock)
    for name, shard in gradients.items():
        wanted = of_stock[name].grad
        error = (shard.local.double() - wanted).norm() / wanted.norm()
        assert error < 2e-5, (name, float(error))


def test_zero_advantages_give_a_zero_gradient_and_change_no_weight(start: Any) -> None:
    samples = [
        TrainSample(
            request_id=s.request_id, prompt_token_ids=s.prompt_token_ids, token_ids=s.token_ids
        )
        for s in made_samples()
    ]
    with start(make_spec()) as trainer:
        trainer.score(samples)
        record = trainer.update(samples, step=1, update=0)
    assert record.metrics["train/grad_norm"] == 0.0
    assert record.changed_weights == 0


def test_masked_sample_is_scored_but_its_advantage_changes_no_gradient(start: Any) -> None:
    digests = []
    for advantage in (1.0, -2.0):
        samples = made_samples()
        samples[3] = TrainSample(
            request_id=samples[3].request_id,
            prompt_token_ids=samples[3].prompt_token_ids,
            token_ids=samples[3].token_ids,
            advantage=advantage,
            masked=True,
        )
        with start(make_spec()) as trainer:
            trainer.score(samples)
            assert samples[3].request_id in trainer.scores()
            digests.append(trainer.update(samples, step=1, update=0).digests["grads"])
    assert digests[0] == digests[1]


def run_update(trainer: Fsdp2Trainer, flip: Flip | None) -> dict[str, Any]:
    samples = made_samples()
    root = trainer.score(samples, flip=flip)
    record = trainer.update(samples, step=1, update=0, flip=flip)
    return {"train_logprobs": root, **record.digests}


@pytest.mark.parametrize(
    "probe", ["train_logprobs", "loss", "grads", "grad_norm", "optimizer", "weights"]
)
def test_a_flip_is_first_seen_at_its_own_probe(probe: Any, start: Any) -> None:
    order = ["train_logprobs", "loss", "grads", "grad_norm", "optimizer", "weights"]
    with start(make_spec()) as trainer:
        clean = run_update(trainer, None)
    with start(make_spec()) as trainer:
        flipped = run_update(trainer, Flip(step=1, probe=probe, bit=30))
    different = [name for name in order if clean[name] != flipped[name]]
    assert different[0] == probe


def test_a_flipped_gradient_is_the_live_one_and_moves_the_weights(start: Any) -> None:
    with start(make_spec()) as trainer:
        clean = run_update(trainer, None)
    name = "model.layers.1.mlp.down_proj.weight"
    with start(make_spec()) as trainer:
        flip = Flip(step=1, probe="grads", name=name, element=5, bit=30)
        flipped = run_update(trainer, flip)
    assert [n for n in clean["grads"] if clean["grads"][n] != flipped["grads"][n]] == [name]
    assert clean["weights"][name] != flipped["weights"][name]


def test_a_flip_outside_of_the_tensor_is_refused(start: Any) -> None:
    with start(make_spec()) as trainer, pytest.raises(SpecError, match="element 10000000"):
        run_update(trainer, Flip(step=1, probe="grads", element=10_000_000))


def test_training_forward_that_differs_from_the_score_stops_the_run(start: Any) -> None:
    with start(make_spec()) as trainer:
        samples = made_samples()
        trainer.score(samples)
        trainer._scores[samples[1].request_id][0] += 1e-6
        with pytest.raises(EngineError, match=f"on 1 tokens, first in {samples[1].request_id}"):
            trainer.update(samples, step=1, update=0)


def test_samples_that_were_not_scored_are_refused_by_name(start: Any) -> None:
    with start(make_spec()) as trainer:
        samples = made_samples()
        trainer.score(samples[:7])
        with pytest.raises(EngineError, match=samples[7].request_id):
            trainer.update(samples, step=1, update=0)


def test_loss_that_is_not_finite_names_the_sample_and_updates_nothing(start: Any) -> None:
    samples = made_samples()
    samples[4] = TrainSample(
        request_id=samples[4].request_id,
        prompt_token_ids=samples[4].prompt_token_ids,
        token_ids=samples[4].token_ids,
        advantage=float("nan"),
    )
    with start(make_spec()) as trainer:
        before = trainer.state_digest()
        trainer.score(samples)
        with pytest.raises(EngineError, match=samples[4].request_id):
            trainer.update(samples, step=1, update=0)
        assert trainer.state_digest() == before


def test_gradient_that_is_not_finite_names_the_parameter(start: Any) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    with start(make_spec()) as trainer:
        samples = made_samples()
        trainer.score(samples)
        gradients, _ = trainer._gradients(samples)
        gradients[name].local[0, 0] = float("inf")
        with pytest.raises(EngineError, match=name):
            trainer._norm(gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_sent_is_the_cast_weights_as_plain_tensors(
    dtype: str, start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ray.put", lambda bucket: bucket)
    with start(make_spec(dtype)) as trainer:
        assert {type(tensor) for _, tensor in trainer.wire_tensors()} == {torch.Tensor}
        buckets, digests = trainer.send(version=1, keep_to=str(tmp_path))
        arrived = {name: tensor for bucket in buckets for name, tensor in unpack(bucket)}
        masters = {name: gathered(shard) for name, shard in trainer._shards.items()}
        before = trainer.weight_digests()
        flip = Flip(step=1, probe="sent", element=3, bit=2)
        flipped = trainer.send(version=1, flip=flip)[1]
        assert trainer.weight_digests() == before
    for name, tensor in arrived.items():
        assert torch.equal(tensor, masters[name].to(getattr(torch, dtype)))
    assert digests == {name: digest_tensor(name, tensor) for name, tensor in arrived.items()}
    assert [n for n in digests if digests[n] != flipped[n]] == ["model.embed_tokens.weight"]
    kept = load_file(tmp_path / "sent.safetensors")
    assert {name: digest_tensor(name, tensor) for name, tensor in kept.items()} == digests


def test_kept_tensors_are_those_that_were_digested(start: Any, tmp_path: Path) -> None:
    with start(make_spec("bfloat16")) as trainer:
        samples = made_samples()
        trainer.score(samples)
        record = trainer.update(samples, step=1, update=0, keep_to=str(tmp_path))
    for probe in ("grads", "optimizer", "weights", "loss", "grad_norm"):
        kept = load_file(tmp_path / f"{probe}.safetensors")
        recorded = {n: d for n, d in record.digests[probe].items() if n != "step"}
        assert {name: digest_tensor(name, tensor) for name, tensor in kept.items()} == recorded


def test_reference_leaves_no_trace_also_when_scoring_fails(start: Any) -> None:
    samples = made_samples()
    with start(make_spec("bfloat16")) as trainer:
        initial = trainer.weight_digests()
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        before = trainer.state_digest()
        trainer.score(samples)
        assert trainer.state_digest() == before
        with (
            pytest.raises(RuntimeError, match="scoring failed"),
            trainer._reference.swapped_in(trainer._shards),
        ):
            assert trainer.weight_digests() == initial
            raise RuntimeError("scoring failed")
        assert trainer.state_digest() == before


def test_audit_lists_exact_ops_only_and_refuses_a_stock_norm(start: Any) -> None:
    slot = pack_slot(made_samples(2))
    with start(make_spec("bfloat16")) as trainer:
        assert "aten.masked_fill" in trainer.audit()
        assert trainer.environment()["ambient"]["ops_outside_shared"]
        norm = trainer._model.model.norm
        norm.forward = lambda hidden: torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon
        )
        with pytest.raises(EngineError, match="outside of the shared ops"):
            audit(trainer._model, slot)


def test_one_process_holds_one_trainer(start: Any) -> None:
    with (
        start(make_spec()),
        pytest.raises(EngineError, match="already is rank 0 of 1"),
        start(make_spec()),
    ):
        pass
