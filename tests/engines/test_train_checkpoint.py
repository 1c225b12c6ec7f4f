"""Checkpoints: complete or refused, of this run or refused, and what a resume goes on from."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.checkpoint.dcp import (
    CheckpointMeta,
    checkpoint_name,
    read_meta,
    read_tensors,
    write_checkpoint,
)
from engines.checkpoint.tiny_model import write_tiny_model
from engines.contracts import TrainSample
from engines.provenance.digest import root_digest
from engines.provenance.fence import RunFolder
from engines.runs import checkpoint_at, checkpoints
from engines.train.fsdp2.actor import Fsdp2Trainer
from model_specs.errors import CheckpointError, StaleAttemptError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.recipes.tiny_cpu import TINY_MODEL, recipe
from model_specs.run_spec import RunSpec

SPEC = recipe()
META = CheckpointMeta(
    trajectory="t" * 32,
    step=3,
    updates=3,
    samples_consumed=96,
    state_digest="s" * 32,
    chain_digest="c" * 32,
    attempt=1,
)


def made_samples(step: int) -> list[TrainSample]:
    draw = random.Random(step)
    return [
        TrainSample(
            request_id=f"{step}/train-{i // 8}/{i % 8}",
            prompt_token_ids=tuple(draw.randrange(100) for _ in range(5)),
            token_ids=tuple(draw.randrange(100) for _ in range(4)),
            advantage=draw.choice([-1.0, 0.5, 1.0]),
        )
        for i in range(32)
    ]


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial")
    write_tiny_model(folder / "hf", TINY_MODEL)
    convert_hf_to_dcp(folder / "hf", folder / "dcp", TINY_MODEL)
    return folder / "dcp"


@pytest.fixture
def start(initial: Path, tmp_path: Path) -> Any:
    count = iter(range(100))

    @contextmanager
    def started(spec: RunSpec = SPEC) -> Iterator[Fsdp2Trainer]:
        trainer = Fsdp2Trainer(
            spec.model_dump_json(),
            dcp_dir=str(initial),
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


def train(trainer: Fsdp2Trainer, *steps: int) -> None:
    for step in steps:
        samples = made_samples(step)
        trainer.score(samples)
        trainer.update(samples, step=step, update=0)


def save(trainer: Fsdp2Trainer, path: Path) -> str:
    return trainer.save(str(path), chain_digest="c" * 32, attempt=1)


@pytest.fixture(scope="module")
def committed(initial: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2; tests that damage it take a copy."""
    folder = tmp_path_factory.mktemp("committed")
    trainer = Fsdp2Trainer(
        SPEC.model_dump_json(),
        dcp_dir=str(initial),
        rank=0,
        world_size=1,
        rendezvous=f"file://{folder}/rendezvous",
        threads=1,
    )
    try:
        train(trainer, 1, 2)
        save(trainer, folder / checkpoint_name(2))
    finally:
        trainer.close()
    return folder / checkpoint_name(2)


def test_state_of_initial_weights_is_the_root_of_the_converted_digests(
    initial: Path, start: Any, tmp_path: Path
) -> None:
    digests = convert_hf_to_dcp(initial.parent / "hf", tmp_path / "again", TINY_MODEL)
    with start() as trainer:
        assert trainer.weight_digests() == digests
        assert trainer.state_digest() == root_digest(digests)


def test_loading_gives_state_progress_and_the_initial_reference(
    committed: Path, start: Any
) -> None:
    meta = read_meta(committed, trajectory=trajectory_fingerprint(SPEC))
    assert (meta.step, meta.updates, meta.samples_consumed) == (2, 2, 64)
    with start() as trainer:
        fresh = trainer.state_digest()
        trainer.score(made_samples(3))
        at_initial_weights = trainer.scores()
        trainer.load(str(committed))
        assert trainer.state_digest() == meta.state_digest != fresh
        trainer.score(made_samples(3))
        assert trainer.reference_scores() == at_initial_weights
        assert trainer.scores() != at_initial_weights
        assert trainer._state.samples_consumed == 64


def test_going_back_to_the_initial_folder_forgets_all_training(
    initial: Path, committed: Path, start: Any
) -> None:
    with start() as trainer:
        fresh = trainer.state_digest()
        trainer.load(str(committed))
        trainer.load(str(initial))
        assert trainer.state_digest() == fresh
        train(trainer, 1)
        once = trainer.state_digest()
    with start() as trainer:
        train(trainer, 1)
        assert trainer.state_digest() == once


def test_checkpoint_without_meta_is_torn(committed: Path, start: Any, tmp_path: Path) -> None:
    torn = shutil.copytree(committed, tmp_path / "checkpoints" / committed.name)
    (torn / "meta.json").unlink()
    with start() as trainer:
        before = trainer.state_digest()
        with pytest.raises(CheckpointError, match=r"no meta\.json"):
            trainer.load(str(torn))
        assert trainer.state_digest() == before
    assert checkpoints(tmp_path) == {}


@pytest.mark.parametrize("content", ["{", '{"schema_version": 1, "step": 3}'])
def test_meta_that_cannot_be_read_is_torn(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(content)
    with pytest.raises(CheckpointError, match="torn"):
        read_meta(folder)
    assert checkpoints(tmp_path) == {}


def test_unknown_schema_version_is_refused_with_both(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"schema_version": 99}')
    with pytest.raises(CheckpointError, match=r"99.* reads 1"):
        read_meta(tmp_path)


def test_checkpoint_of_another_trajectory_is_refused_with_both(committed: Path, start: Any) -> None:
    other = SPEC.model_copy(update={"optimizer": SPEC.optimizer.model_copy(update={"lr": 1e-4})})
    with start(other) as trainer, pytest.raises(CheckpointError) as caught:
        trainer.load(str(committed))
    assert trajectory_fingerprint(SPEC) in str(caught.value)
    assert trajectory_fingerprint(other) in str(caught.value)


def test_one_flipped_byte_of_the_data_is_refused_with_both_states(
    committed: Path, start: Any, tmp_path: Path
) -> None:
    damaged = shutil.copytree(committed, tmp_path / committed.name)
    (file,) = damaged.glob("*.distcp")
    content = bytearray(file.read_bytes())
    # Headers are a small part of the file: its middle is the data of some tensor.
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    meta = read_meta(committed)
    with start() as trainer, pytest.raises(CheckpointError, match=meta.state_digest):
        trainer.load(str(damaged))


def test_checkpoint_whose_data_is_missing_is_refused(
    committed: Path, start: Any, tmp_path: Path
) -> None:
    damaged = shutil.copytree(committed, tmp_path / committed.name)
    (file,) = damaged.glob("*.distcp")
    file.unlink()
    with start() as trainer, pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer.load(str(damaged))


def test_stale_attempt_commits_nothing(start: Any, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", run_id="r")
    fence = run.new_attempt()
    target = tmp_path / "run" / "a" / "checkpoints" / checkpoint_name(1)
    with start() as trainer:
        train(trainer, 1)
        trainer.save(
            str(target), chain_digest="c" * 32, attempt=fence.token, run_folder=fence.run_folder
        )
        first = target.joinpath("meta.json").read_bytes()
        run.new_attempt()
        with pytest.raises(StaleAttemptError):
            trainer.save(
                str(target), chain_digest="d" * 32, attempt=fence.token, run_folder=str(run.path)
            )
    assert target.joinpath("meta.json").read_bytes() == first
    assert [found.uri for found in checkpoints(target.parents[1]).values()] == [str(target)]


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    target = tmp_path / "step-000003"
    write_checkpoint(target, {"model.w": torch.arange(4.0)}, meta=META)
    write_checkpoint(
        target, {"model.w": torch.arange(4.0) + 1}, meta=dataclasses.replace(META, attempt=2)
    )
    loaded = {"model.w": torch.zeros(4)}
    read_tensors(target, loaded)
    assert loaded["model.w"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert read_meta(target).attempt == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_what_reads_back_differently_is_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engines.checkpoint.dcp as module

    honest = module.read_tensors

    def lying(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        honest(path, tensors)
        tensors["model.w"][2] += 1

    monkeypatch.setattr(module, "read_tensors", lying)
    with pytest.raises(CheckpointError, match=r"model\.w"):
        write_checkpoint(
            tmp_path / "checkpoints" / "step-000003", {"model.w": torch.arange(4.0)}, meta=META
        )
    assert checkpoints(tmp_path) == {}
    assert not (tmp_path / "checkpoints" / "step-000003").exists()


def test_negative_zero_and_nan_payloads_survive(tmp_path: Path) -> None:
    bits = torch.tensor([-(2**31), 0x7FC00001, 0x7F800000, 1], dtype=torch.int32)
    write_checkpoint(tmp_path / "c", {"model.w": bits.view(torch.float32)}, meta=META)
    loaded = {"model.w": torch.ones(4)}
    read_tensors(tmp_path / "c", loaded)
    assert torch.equal(loaded["model.w"].view(torch.int32), bits)


def test_listing_is_by_step_and_leaves_out_what_is_not_committed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (12, 4, 8):
        folder = root / checkpoint_name(step)
        folder.mkdir(parents=True)
        meta = dataclasses.asdict(dataclasses.replace(META, step=step))
        (folder / "meta.json").write_text(json.dumps(meta))
    shutil.copytree(root / checkpoint_name(12), root / "step-000016.partial")
    (root / checkpoint_name(20)).mkdir()
    assert list(checkpoints(tmp_path)) == [4, 8, 12]
    assert checkpoint_at(tmp_path, None)[0] == 12
    assert checkpoints(tmp_path / "none") == {}
