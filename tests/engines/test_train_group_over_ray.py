"""The trainer through the driver's interface: two Ray processes against one in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.checkpoint.tiny_model import write_tiny_model
from engines.cluster import Cluster
from engines.contracts import TrainSample, UpdateRecord
from engines.provenance.tensor_digest import digest_tensor
from engines.runs import checkpoints
from engines.train.fsdp2.actor import Fsdp2Trainer
from engines.train.group import TrainerGroup, trainer_env
from engines.weights.wire import resolve, unpack
from model_specs.errors import EngineError
from model_specs.recipes.tiny_cpu import TINY_MODEL, recipe
from model_specs.run_spec import ExecutionSpec, RunSpec

SAMPLES = [
    TrainSample(
        request_id=f"1/train-{i // 8}/{i % 8}",
        prompt_token_ids=tuple(range(4, 10 + i)),
        token_ids=tuple((7 * i + k) % 100 for k in range(1 + i % 6)),
        advantage=(i % 5 - 2) / 2,
    )
    for i in range(32)
]


def spec_for(ranks: int) -> RunSpec:
    execution = ExecutionSpec(trainer_ranks=ranks, object_store_mib=100)
    return recipe().model_copy(update={"execution": execution})


def one_rank(folder: Path) -> tuple[str, UpdateRecord, str]:
    trainer = Fsdp2Trainer(
        spec_for(1).model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        rank=0,
        world_size=1,
        rendezvous=f"file://{folder}/rendezvous-1",
        threads=1,
    )
    try:
        root = trainer.score(SAMPLES)
        record = trainer.update(SAMPLES, step=1, update=0)
        return root, record, trainer.state_digest()
    finally:
        trainer.close()


@pytest.mark.slow
def test_group_of_two_processes_trains_sends_saves_and_reloads_like_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "hf", TINY_MODEL)
    initial = convert_hf_to_dcp(tmp_path / "hf", tmp_path / "dcp", TINY_MODEL)
    root, expected, state = one_rank(tmp_path)
    spec = spec_for(2)
    with Cluster("train-group-test", num_cpus=2, object_store_mib=100) as cluster:
        hosts = [cluster.start(f"trainer-{r}", env=trainer_env(spec), num_cpus=1) for r in (0, 1)]
        trainer = TrainerGroup(hosts, spec)
        trainer.start(spec, dcp_dir=tmp_path / "dcp", rendezvous=f"file://{tmp_path}/rendezvous-2")
        assert trainer.weight_digests() == initial
        fresh = trainer.state_digest()
        assert trainer.score(SAMPLES) == root
        record = trainer.update(SAMPLES, step=1, update=0)
        assert record == expected
        assert trainer.state_digest() == state
        references, sent = trainer.send(version=1)
        arrived = {n: t for bucket in resolve(references) for n, t in unpack(bucket)}
        assert {name: digest_tensor(name, tensor) for name, tensor in arrived.items()} == sent
        path = tmp_path / "checkpoints" / "step-000001"
        saved = trainer.save(path, chain_digest="c" * 32, attempt=1, run_folder=None)
        assert saved == state
        assert trainer.ensure_at(tmp_path / "dcp", fresh) is True
        assert trainer.ensure_at(path, state) is True
        assert trainer.ensure_at(path, state) is False
        with pytest.raises(EngineError, match="the last score"):
            trainer.update(SAMPLES, step=2, update=0)
        assert trainer.environment()["torch"]
    assert {step: found.digest for step, found in checkpoints(tmp_path).items()} == {1: state}
