"""A trainer that sleeps between any two calls is bit for bit the one that never does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.contracts import UpdateRecord
from engines.host import Host
from engines.provenance.tensor_digest import digest_tensor
from engines.train import sleep
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec, ScheduleSpec
from tests.engines.conftest import MEGATRON_VARIABLE
from tests.engines.trainer_cases import QWEN2, made_samples, make_spec, started, write_model

SCHEDULE = ScheduleSpec(kind="linear", warmup_samples=8, horizon_samples=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sleep"), QWEN2)


def spec_for(trainer: str) -> RunSpec:
    spec = make_spec("bfloat16", kl_coef=0.1)
    return spec.model_copy(update={"trainer": trainer, "schedule": SCHEDULE})


def history(trainer: GrpoTrainer, between: Callable[[GrpoTrainer], Any], path: Path) -> list[Any]:
    """Everything that two updates leave behind, `between` being called between any two calls."""
    found: list[Any] = []
    for step in (1, 2):
        samples = made_samples(seed=step)
        between(trainer)
        found.append(trainer.score(samples))
        between(trainer)
        found.append(trainer.reference_scores())
        assert found[-1], "vacuous: no reference is held beside what sleeps"
        record = trainer.update(samples, step=step, update=0, keep_to=str(path / str(step)))
        found.append(record)
        between(trainer)
        found.append({name: digest_tensor(name, t) for name, t in trainer.wire_tensors()})
        between(trainer)
        found.append(trainer.state_digest())
    saved = path / "checkpoint"
    between(trainer)
    found.append(trainer.save(str(saved), chain_digest="c" * 32, attempt=1))
    between(trainer)
    trainer.load(str(saved))
    found.append((trainer.state_digest(), trainer._state.step, trainer._optimizer.num_steps))
    for file in sorted(path.rglob("*.safetensors")):
        found.append((file.relative_to(path).as_posix(), file.read_bytes()))
    return found


def nap(trainer: GrpoTrainer) -> None:
    trainer.sleep()
    trainer.wake()


@pytest.fixture(scope="module", params=sorted(TRAINERS))
def name(request: pytest.FixtureRequest) -> str:
    """Each trainer, and all tests of it one after the other."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def awake(name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the trainer leaves behind when it never sleeps."""
    path = tmp_path_factory.mktemp("awake")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MEGATRON_VARIABLE, "0")
        with started(spec_for(name), folder, path) as trainer:
            return history(trainer, lambda _: None, path / "kept")


def test_a_trainer_that_sleeps_equals_its_replay_that_never_slept(
    name: str, awake: list[Any], folder: Path, tmp_path: Path
) -> None:
    with started(spec_for(name), folder, tmp_path) as trainer:
        slept = history(trainer, nap, tmp_path / "kept")
    rates = {found.metrics["train/lr"] for found in awake if isinstance(found, UpdateRecord)}
    assert len(rates) == 2, "vacuous: the schedule does not move"
    for one, other in zip(awake, slept, strict=True):
        assert one == other


def test_a_nap_that_loses_one_storage_is_seen(
    name: str,
    awake: list[Any],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: what comes back empty changes the record."""

    def lossy(trainer: GrpoTrainer) -> None:
        trainer.sleep()
        resident = trainer._resident
        *held, (storage, values) = resident._held
        monkeypatch.setattr(resident, "_held", [*held, (storage, torch.zeros_like(values))])
        trainer.wake()

    with started(spec_for(name), folder, tmp_path) as trainer:
        slept = history(trainer, lossy, tmp_path / "kept")
    assert awake != slept


def test_asleep_nothing_has_memory_and_nothing_is_let_through(
    name: str, folder: Path, tmp_path: Path
) -> None:
    with started(spec_for(name), folder, tmp_path) as trainer:
        tensors = list(trainer._resident_tensors())
        num_bytes = sum(t.untyped_storage().nbytes() for t in tensors)
        whole = sum(t.numel() * t.element_size() for t in tensors)
        assert num_bytes >= whole > 4 * 3 * 200_000
        figures = trainer.sleep()
        assert figures["before_mib"] > 0
        assert figures["after_mib"] > 0
        assert sum(t.untyped_storage().nbytes() for t in tensors) == 0
        assert trainer._reference is not None
        rows = list(trainer._reference.rows())
        assert sum(t.untyped_storage().nbytes() for t in rows) >= 2 * 200_000, "of the host: stays"
        host = Host()
        host.engine = trainer
        with pytest.raises(EngineError, match="state_digest was called on an engine that sleeps"):
            host.call("state_digest")
        assert host.call("environment")["torch"]
        with pytest.raises(EngineError, match="sleeps already"):
            trainer.sleep()
        host.call("wake")
        assert host.call("state_digest")
        with pytest.raises(EngineError, match="is awake"):
            trainer.wake()
        assert sum(t.untyped_storage().nbytes() for t in tensors) == num_bytes


def test_sleep_gives_memory_back_and_views_stay_views() -> None:
    big = torch.arange(16 * 2**20, dtype=torch.float32)
    view, copy = big[5:9], big.clone()
    resident = sleep.Resident(lambda: [big, view])
    figures = resident.sleep()
    assert big.untyped_storage().nbytes() == 0
    assert figures["after_mib"] < figures["before_mib"] + 32  # the copy on the host is this memory
    resident.wake()
    assert torch.equal(big, copy)
    assert view.data_ptr() == big.data_ptr() + 20
