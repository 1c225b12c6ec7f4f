"""Rollout engine and trainer as the product starts them, colocated on one GPU, for measurements."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.cluster import Cluster, EngineHandle, gather
from engines.contracts import Sample, TrainSample
from engines.rollout.group import RolloutGroup, engine_env
from engines.train.group import TrainerGroup, trainer_env
from model_specs.run_spec import RunSpec

ENGINE = "engines.rollout.vllm_engine:VllmEngine"


@dataclass(kw_only=True)
class Started:
    """Engines of one spec."""

    spec: RunSpec
    model: str
    masters: Path
    cluster: Cluster
    engine: EngineHandle
    rank: EngineHandle
    rollout: RolloutGroup
    trainer: TrainerGroup
    start_s: float

    def push(self, version: int, *others: RolloutGroup) -> bool:
        """Push the trainer's weights to its engine, and give them to others all at once.

        Returns whether what arrived everywhere is what was sent.
        """
        sent, received = self.trainer.push(self.rollout, version=version)
        if not others:
            return sent == received
        buckets, again = self.trainer.send(version=version)
        held = [group.receive(buckets, version=version) for group in others]
        return all(digests == sent for digests in (received, again, *held))

    def another_engine(self, name: str) -> RolloutGroup:
        """Start a second rollout engine, without weights yet."""
        policy = self.spec.numerics.policy
        handle = self.cluster.start(name, env=engine_env(self.spec, policy), num_cpus=1)
        created = handle.actor.create.remote(
            ENGINE, self.model, self.spec.model_dump_json(), policy=policy
        )
        gather([created], what=f"start of {name}", timeout_s=500)
        return RolloutGroup([handle], self.spec)


@contextmanager
def started(spec: RunSpec, scratch: Path, *, model: str | None = None) -> Iterator[Started]:
    """Start both on `model`, or on random weights that are written to `scratch` once."""
    scratch.mkdir(parents=True, exist_ok=True)
    spec_json, policy = spec.model_dump_json(), spec.numerics.policy
    store = spec.execution.object_store_mib
    with Cluster("gpu-measurement", num_cpus=4, object_store_mib=store) as cluster:
        engine = cluster.start("rollout-0", env=engine_env(spec, policy), num_cpus=1)
        rank = cluster.start("trainer-0", env=trainer_env(spec), num_cpus=1)
        model = model or str(scratch / "model")
        if not Path(model).is_dir():
            write = "tools.gpu.shapes:write_random_model"
            drawn = rank.run(write, model, spec_json, device=spec.execution.device)
            gather([drawn], what="random weights", timeout_s=500)
        begun = time.perf_counter()
        created = engine.actor.create.remote(ENGINE, model, spec_json, policy=policy)
        masters = scratch / "dcp"
        if not masters.is_dir():
            convert = "engines.checkpoint.convert:convert_hf_to_dcp"
            gather([rank.run(convert, model, str(masters), spec.model)], what="conversion")
        trainer = TrainerGroup([rank], spec)
        rendezvous = f"file://{scratch}/rendezvous-{time.time_ns()}"
        trainer.start(spec, dcp_dir=masters, rendezvous=rendezvous)
        gather([created], what="start of the engine", timeout_s=500)
        rollout = RolloutGroup([engine], spec)
        trainer.connect(rollout, rendezvous=scratch / f"weights-{time.time_ns()}")
        yield Started(
            spec=spec,
            model=model,
            masters=masters,
            cluster=cluster,
            engine=engine,
            rank=rank,
            rollout=rollout,
            trainer=trainer,
            start_s=round(time.perf_counter() - begun, 1),
        )


def as_train(samples: tuple[Sample, ...]) -> list[TrainSample]:
    """Return samples to train on, with advantages of +1 and -1 by turns."""
    return [
        TrainSample(
            request_id=sample.request_id,
            prompt_token_ids=sample.prompt_token_ids,
            token_ids=sample.token_ids,
            advantage=1.0 if index % 2 else -1.0,
        )
        for index, sample in enumerate(samples)
    ]


def memory() -> dict[str, Any]:
    """Return this process's GPU memory in MiB: the allocator's peaks."""
    import torch

    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
    }
