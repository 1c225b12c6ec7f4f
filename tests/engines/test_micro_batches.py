"""A slot whole, cut at any limit, or one sequence at a time: every bit of every gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import engines.train.trainer as trainer_module
from engines.contracts import TrainSample
from engines.numerics.slot_sums import OpSums
from engines.train.registry import TRAINERS
from engines.train.slots import num_rows, plan_slots
from engines.train.trainer import GrpoTrainer
from model_specs.errors import EngineError
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import StockReduction
from model_specs.trainer_options import TrainerOptions
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
SHORT_SET = (("qwen2", "bfloat16"), ("llama", "float32"), ("qwen3_moe", "bfloat16"))
"""What `make test` runs of all families and dtypes."""
LIMITS = (9216, 320, 192, 128)
"""Rows; the samples have 64 or 128 each, four in a slot."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    return {
        model.family: write_model(tmp_path_factory.mktemp(model.family), model)
        for model in FAMILIES
    }


def limit(trainer: GrpoTrainer, rows: int | None) -> None:
    """Set the bound of a trainer that runs; it is read at every update."""
    changed = trainer.spec.trainer_options.model_copy(update={"max_tokens_per_rank": rows})
    trainer.spec = trainer.spec.model_copy(update={"trainer_options": changed})


def gradients(trainer: GrpoTrainer, samples: list[TrainSample]) -> dict[str, torch.Tensor]:
    return {n: shard.local.clone() for n, shard in trainer._gradients(samples)[0].items()}


@pytest.fixture
def parts_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of samples of every forward and backward, as they are run."""
    sizes: list[int] = []
    honest = GrpoTrainer._backward

    def counted(self: GrpoTrainer, samples: Sequence[TrainSample], totals: object) -> object:
        sizes.append(len(samples))
        return honest(self, samples, totals)  # type: ignore[arg-type]

    monkeypatch.setattr(GrpoTrainer, "_backward", counted)
    return sizes


def same(ours: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the gradients that differ."""
    assert ours.keys() == whole.keys()
    return [name for name in whole if not torch.equal(ours[name], whole[name])]


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(
            model,
            dtype,
            id=f"{model.family}-{dtype}",
            marks=() if (model.family, dtype) in SHORT_SET else pytest.mark.exhaustive,
        )
        for model in FAMILIES
        for dtype in DTYPES
    ],
)
def test_whole_cut_and_single_sequences_give_every_bit_of_every_gradient(
    model: ModelSpec,
    dtype: str,
    trainer: str,
    folders: dict[str, Path],
    tmp_path: Path,
    parts_run: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = made_samples()
    spec = make_spec(dtype, model=model, kl_coef=0.1, entropy_coef=0.01)
    named = spec.model_copy(update={"trainer": trainer})
    with started(named, folders[model.family], tmp_path) as running:
        running.score(samples)
        whole = gradients(running, samples)
        assert parts_run == [4, 4]
        assert all(float(gradient.abs().max()) > 0 for gradient in whole.values())
        counts = []
        for rows in LIMITS:
            parts_run.clear()
            limit(running, rows)
            assert same(gradients(running, samples), whole) == [], rows
            counts.append(len(parts_run))
            assert sum(parts_run) == len(samples)
        monkeypatch.setattr(
            trainer_module,
            "plan_slot_parts",
            lambda rows, slots, max_rows: [[(index,) for index in slot] for slot in slots],
        )
        parts_run.clear()
        assert same(gradients(running, samples), whole) == []
        assert parts_run == [1] * len(samples)
    assert counts[0] == 2 < counts[1] < counts[2] < counts[3]


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_updates_in_micro_batches_with_layers_run_again_give_every_bit(
    trainer: str, folders: dict[str, Path], tmp_path: Path, parts_run: list[int]
) -> None:
    """Three updates, experts, gradient checkpointing: state and all probes."""
    logs = []
    for options in (
        TrainerOptions(),
        TrainerOptions(max_tokens_per_rank=128, gradient_checkpointing=True),
    ):
        parts_run.clear()
        spec = make_spec("bfloat16", model=QWEN3_MOE, kl_coef=0.1)
        named = spec.model_copy(update={"trainer": trainer, "trainer_options": options})
        with started(named, folders["qwen3_moe"], tmp_path) as running:
            log: list[object] = []
            for step in (1, 2, 3):
                samples = made_samples(seed=step)
                log.append(running.score(samples))
                record = running.update(samples, step=step, update=0)
                log += [record.digests, record.metrics]
            logs.append([*log, running.state_digest()])
        assert len(parts_run) == 6 if options.max_tokens_per_rank is None else len(parts_run) > 12
    assert logs[0] == logs[1]


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_the_stock_reduction_takes_micro_batches_too(
    trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    samples = made_samples()
    spec = make_spec("bfloat16").model_copy(
        update={"trainer": trainer, "reduction": StockReduction(slots=2, world_size=1)}
    )
    with started(spec, folders["qwen2"], tmp_path) as running:
        running.score(samples)
        whole = gradients(running, samples)
        limit(running, 128)
        assert same(gradients(running, samples), whole) == []


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_an_op_that_rounds_in_every_micro_batch_is_refused_by_its_parameter(
    trainer: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: such sums have other bits, so an op that does not keep them must not pass."""
    samples = made_samples()
    spec = make_spec("bfloat16").model_copy(update={"trainer": trainer})
    with started(spec, folders["qwen2"], tmp_path) as running:
        running.score(samples)
        whole = gradients(running, samples)
        limit(running, 128)
        monkeypatch.setattr(OpSums, "total", lambda self, index: None)
        monkeypatch.setattr(OpSums, "rounded", lambda self, index, total, dtype: total.to(dtype))
        with pytest.raises(EngineError, match="before the last micro-batch of its slot"):
            running._gradients(samples)
    with started(spec, folders["qwen2"], tmp_path) as running:
        running.score(samples)
        limit(running, 128)
        monkeypatch.setattr(trainer_module, "require_no_gradient", lambda model: None)
        if trainer == "megatron":  # FSDP2 would reduce every part as a slot of its own
            assert len(same(gradients(running, samples), whole)) > len(whole) / 2


def test_the_plan_of_the_samples_is_the_one_that_the_limits_mean() -> None:
    rows = [num_rows(sample) for sample in made_samples()]
    assert set(rows) == {64, 128}
    assert [len(slot) for slot in plan_slots(len(rows), num_slots=2)] == [4, 4]
