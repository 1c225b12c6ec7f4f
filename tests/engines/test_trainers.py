"""Laws that every trainer keeps, on one rank: step 0, packing, gradients, flips, sending."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.contracts import Flip, TrainSample
from engines.provenance.digest import digest_floats, root_digest
from engines.provenance.tensor_digest import digest_tensor, digest_tensors
from engines.train.registry import TRAINERS
from engines.train.shards import gathered
from engines.train.slots import pack_slot
from engines.train.trainer import GrpoTrainer
from engines.weights.wire import unpack
from model_specs.errors import EngineError, SpecError
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec
from model_specs.trainer_options import TrainerOptions
from tests.engines.trainer_cases import (
    DTYPES,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    made_samples,
    make_spec,
    plain_loss,
    started,
    stock_gradients,
    stock_model,
    write_model,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    return {
        model.family: write_model(tmp_path_factory.mktemp(model.family), model)
        for model in (QWEN2, LLAMA, QWEN3, QWEN3_MOE)
    }


@pytest.fixture(params=sorted(TRAINERS))
def start(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Any:
    """Return a context manager that starts this trainer on a spec and closes it."""

    def start_trainer(spec: RunSpec) -> AbstractContextManager[GrpoTrainer]:
        named = spec.model_copy(update={"trainer": request.param})
        return started(named, folders[spec.model.family], tmp_path)

    return start_trainer


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


@pytest.mark.parametrize("model", [QWEN2, LLAMA, QWEN3, QWEN3_MOE], ids=lambda model: model.family)
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
        stock = stock_model(trainer, torch.float64)
        expected = plain_loss(lambda ids: stock(ids[None]).logits[0], samples, trainer)
        expected.backward()
        gradients, figures = trainer._gradients(samples)
        loss = sum(figure.figures["loss"] for figure in figures)
        clipped = sum(figure.figures["pg_clipfrac"] for figure in figures)
    assert 0.0 < clipped < 1.0
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    of_stock = stock_gradients(stock)
    assert set(gradients) == set(of_stock)
    for name, shard in gradients.items():
        wanted = of_stock[name]
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


def test_only_matrices_are_decayed(start: Any) -> None:
    """With no gradient at all, what moves is decay: biases and norms must stay."""
    spec = make_spec("float32", lr=0.25)
    optimizer = spec.optimizer.model_copy(update={"weight_decay": 0.5})
    samples = [replace(sample, advantage=0.0) for sample in made_samples()]
    with start(spec.model_copy(update={"optimizer": optimizer})) as trainer:
        before = {name: gathered(shard).clone() for name, shard in trainer._shards.items()}
        trainer.score(samples)
        trainer.update(samples, step=1, update=0)
        after = {name: gathered(shard) for name, shard in trainer._shards.items()}
    for name, weight in before.items():
        factor = 1 - 0.25 * 0.5 if weight.dim() > 1 else 1.0
        assert torch.equal(after[name], weight * factor), name
    assert {weight.dim() for weight in before.values()} == {1, 2}


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


def run_update(trainer: GrpoTrainer, flip: Flip | None) -> dict[str, Any]:
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


def test_a_bound_on_tokens_cuts_the_score_and_changes_no_bit(start: Any) -> None:
    samples, roots, forwards = made_samples(), [], []
    for bound in (None, 9216, 128):
        options = TrainerOptions(max_tokens_per_rank=bound)
        spec = make_spec("bfloat16", reference=False).model_copy(
            update={"trainer_options": options}
        )
        with start(spec) as trainer:
            sizes: list[int] = []
            trainer._model.register_forward_pre_hook(
                lambda _, args, sizes=sizes: sizes.append(len(args[0].ids))
            )
            roots.append(trainer.score(samples))
            forwards.append(sizes)
    assert len(set(roots)) == 1
    assert forwards[0] == forwards[1]
    assert len(forwards[2]) > len(forwards[0])
    assert max(forwards[2]) <= 128 < max(forwards[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_checkpointing_keeps_fewer_bytes_and_every_bit(dtype: str, start: Any) -> None:
    samples, logs, kept = made_samples(), [], []
    for on in (False, True):
        options = TrainerOptions(gradient_checkpointing=on)
        spec = make_spec(dtype, kl_coef=0.1).model_copy(update={"trainer_options": options})
        with start(spec) as trainer:
            log: list[Any] = []
            for step in (1, 2):
                log.append(trainer.score(samples))
                log.append(trainer.update(samples, step=step, update=0).digests)
            logs.append([*log, trainer.state_digest()])
            kept.append(bytes_kept_for_backward(trainer, samples))
    assert logs[0] == logs[1]
    assert kept[1] < kept[0] / 2


def bytes_kept_for_backward(trainer: GrpoTrainer, samples: list[TrainSample]) -> int:
    """Bytes of all distinct storages that one training forward keeps, parameters left out."""
    sizes: dict[int, int] = {}
    parameters = {p.data_ptr() for p in trainer._model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer._model(pack_slot(samples))
    return sum(sizes.values())


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
    assert arrived.keys() ^ masters.keys() == set()
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
        with pytest.raises(RuntimeError, match="scoring failed"):
            fail_under_the_reference(trainer, initial)
        assert trainer.state_digest() == before


def fail_under_the_reference(trainer: GrpoTrainer, initial: dict[str, str]) -> None:
    assert trainer._reference is not None
    with trainer._reference.swapped_in(trainer._shards):
        assert trainer.weight_digests() == initial
        raise RuntimeError("scoring failed")


def test_digest_of_the_reference_is_unchanged_after_every_use(start: Any) -> None:
    samples = made_samples()
    with start(make_spec("bfloat16", kl_coef=0.1)) as trainer:
        assert trainer._reference is not None
        before = digest_tensors(trainer._reference._rows)
        weights = []
        for step in (1, 2, 3):
            trainer.score(samples)
            assert digest_tensors(trainer._reference._rows) == before
            weights.append(trainer.update(samples, step=step, update=0).digests["weights"])
            assert digest_tensors(trainer._reference._rows) == before
    assert len({str(sorted(digests.items())) for digests in weights}) == 3


def test_audit_lists_exact_ops_only_and_refuses_a_stock_norm(start: Any) -> None:
    with start(make_spec("bfloat16")) as trainer:
        assert "aten.masked_fill" in trainer.audit()
        assert trainer.environment()["ambient"]["ops_outside_shared"]
        modules = dict(trainer._model.named_modules())
        norm = modules.get("model.norm") or modules["decoder.final_layernorm"]
        norm.forward = lambda hidden: torch.nn.functional.rms_norm(
            hidden, hidden.shape[-1:], norm.weight, QWEN2.rms_norm_eps
        )
        with pytest.raises(EngineError, match="outside of the shared ops"):
            trainer.audit()


def test_one_process_holds_one_trainer(start: Any) -> None:
    with (
        start(make_spec()),
        pytest.raises(EngineError, match="already is rank 0 of 1"),
        start(make_spec()),
    ):
        pass
