"""Mutations of the trainers, each of which must make a test of another module fail, by name.

A test that passes whatever the code does proves nothing. Here a fault that real trainers have had
is put in, and the test that is there to find it is run and has to fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import engines.train.trainer as trainer_module
from engines import numerics
from engines.train.fsdp2.actor import Fsdp2Trainer
from engines.train.megatron.actor import MegatronTrainer
from engines.train.reference import Reference
from engines.train.registry import TRAINERS
from engines.train.shards import Shard
from engines.train.trainer import GrpoTrainer
from model_specs.run_spec import RunSpec
from tests.engines import test_trainers, test_trainers_float64
from tests.engines.rank_program import Job, run_ranks
from tests.engines.test_trainers_data_parallel import CASES as PARALLEL_CASES
from tests.engines.test_trainers_data_parallel import (
    test_any_number_of_ranks_of_any_trainer_gives_one_digest as ranks_test,
)
from tests.engines.trainer_cases import QWEN2, started, write_model

FLOAT64_TEST = test_trainers_float64.test_float32_gradient_is_within_the_bounds_of_float64
REFERENCE_TEST = test_trainers.test_reference_leaves_no_trace_also_when_scoring_fails
REFERENCE_SCORES_TEST = test_trainers_float64.test_reference_scores_are_float64s_of_initial_weights
DECAY_TEST = test_trainers.test_only_matrices_are_decayed
SENT_TEST = test_trainers.test_what_is_sent_is_the_cast_weights_as_plain_tensors

pytestmark = pytest.mark.parametrize("trainer", sorted(TRAINERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), QWEN2)


@pytest.fixture
def start(trainer: str, folder: Path, tmp_path: Path) -> Any:
    def start_trainer(spec: RunSpec) -> AbstractContextManager[GrpoTrainer]:
        return started(spec.model_copy(update={"trainer": trainer}), folder, tmp_path)

    return start_trainer


def test_without_a_mutation_the_tests_pass(
    trainer: str, start: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: they fail below for no other reason than the mutation."""
    FLOAT64_TEST(test_trainers_float64.CASES[0], QWEN2, trainer, {"qwen2": folder}, tmp_path)
    REFERENCE_TEST(start)
    REFERENCE_SCORES_TEST(trainer, {"qwen2": folder}, tmp_path)
    DECAY_TEST(start)
    SENT_TEST("bfloat16", start, monkeypatch, tmp_path)


def test_a_lost_micro_batch_scale_is_found(
    trainer: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot as if it were the whole update: its loss is not divided by the slots' number."""
    honest, slots = trainer_module.slot_loss, 2
    monkeypatch.setattr(
        trainer_module, "slot_loss", lambda terms, weights: honest(terms, weights * slots)
    )
    with pytest.raises(AssertionError):
        FLOAT64_TEST(test_trainers_float64.CASES[0], QWEN2, trainer, {"qwen2": folder}, tmp_path)


def test_a_lost_residual_of_one_layer_is_found(
    trainer: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = numerics.add, count()
    monkeypatch.setattr(numerics, "add", lambda x, y: y if next(calls) % 4 == 2 else honest(x, y))
    with pytest.raises(AssertionError):
        FLOAT64_TEST(test_trainers_float64.CASES[0], QWEN2, trainer, {"qwen2": folder}, tmp_path)


def test_a_lost_switch_back_to_the_actor_is_found(
    trainer: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def without_switch_back(self: Any, live: Mapping[str, Shard]) -> Iterator[None]:
        for name, shard in live.items():
            shard.local.copy_(self._rows[name])
        self._publish()
        yield

    monkeypatch.setattr(Reference, "swapped_in", without_switch_back)
    with pytest.raises(AssertionError):
        REFERENCE_TEST(start)


def test_a_lost_switch_to_the_reference_is_found(
    trainer: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def without_switch(self: Any, live: Mapping[str, Shard]) -> Iterator[None]:
        yield

    monkeypatch.setattr(Reference, "swapped_in", without_switch)
    with pytest.raises(AssertionError):
        REFERENCE_SCORES_TEST(trainer, {"qwen2": folder}, tmp_path)


def test_a_lost_no_decay_group_is_found(
    trainer: str, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = numerics.adamw_steps_

    def decaying(*tensors: torch.Tensor, **settings: Any) -> None:
        honest(*tensors, **{**settings, "weight_decay": 0.5})

    monkeypatch.setattr(numerics, "adamw_steps_", decaying)
    with pytest.raises(AssertionError, match=r"norm|bias"):
        DECAY_TEST(start)


def test_a_lost_tensor_of_a_push_is_found(
    trainer: str, start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = {"fsdp2": Fsdp2Trainer, "megatron": MegatronTrainer}[trainer]
    honest, lost = kind.wire_tensors, "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(
        kind, "wire_tensors", lambda self: ((n, t) for n, t in honest(self) if n != lost)
    )
    with pytest.raises(AssertionError, match="up_proj"):
        SENT_TEST("bfloat16", start, monkeypatch, tmp_path)


@pytest.mark.slow
def test_a_gradient_divided_by_the_number_of_ranks_is_found(trainer: str, tmp_path: Path) -> None:
    name = "grpo"
    spec = PARALLEL_CASES[name].model_copy(update={"trainer": trainer})
    folder = write_model(tmp_path / "model", spec.model)
    logs = {
        size: run_ranks(
            tmp_path / str(size),
            [
                Job(
                    name=f"{run} {name}",
                    spec_json=spec.model_copy(update={"trainer": run}).model_dump_json(),
                    dcp_dir=str(folder / "dcp"),
                    steps=(1, 2),
                    mean_over_ranks=size > 1,
                )
                for run in sorted({trainer, "fsdp2"})
            ],
            world_size=size,
        )
        for size in (1, 2)
    }
    with pytest.raises(AssertionError, match=r"\(2, '1\.0'\)"):
        ranks_test(name, trainer, logs)
