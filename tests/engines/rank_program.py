"""The program of one rank: `python -m tests.engines.rank_program RANK WORLD_SIZE JOBS.json`.

A job is a trainer run over some steps in fresh processes; its log is everything that must not
depend on how it was run. `run_ranks` starts the ranks and returns the logs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import numerics
from engines.contracts import TrainSample
from engines.numerics import tree_sum
from engines.provenance.tensor_digest import digest_tensor
from engines.train.registry import TRAINERS
from model_specs.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]

Log = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one trainer."""

    name: str
    spec_json: str
    dcp_dir: str
    steps: tuple[int, ...]
    updates: int = 1
    load: str | None = None
    save: str | None = None
    """Checkpoint that is written after step 2."""
    keep_to: str | None = None
    """Folder for the tensors of the first update."""
    mean_over_ranks: bool = False
    """A mutation: the ranks' gradients are averaged, as data parallelism commonly does."""


def made_samples(step: int, *, count: int = 16, vocab_size: int = 101) -> list[TrainSample]:
    """Samples of uneven lengths from a hash, equal in every process."""

    def draw(*labels: object, below: int) -> int:
        return int.from_bytes(hashlib.sha256(repr(labels).encode()).digest()[:8], "big") % below

    return [
        TrainSample(
            request_id=f"{step}/train-{i // 4}/{i % 4}",
            prompt_token_ids=tuple(
                draw(step, i, "p", k, below=vocab_size)
                for k in range(3 + draw(step, i, "P", below=80))
            ),
            token_ids=tuple(
                draw(step, i, "c", k, below=vocab_size)
                for k in range(1 + draw(step, i, "C", below=30))
            ),
            advantage=(draw(step, i, "a", below=9) - 4) / 4,
        )
        for i in range(count)
    ]


def run_job(job: Job, *, rank: int, world_size: int, rendezvous: Path) -> Log:
    """Train over the job's steps; return everything that must not depend on how it was run."""
    spec = RunSpec.model_validate_json(job.spec_json)
    module, _, name = TRAINERS[spec.trainer].partition(":")
    trainer = getattr(importlib.import_module(module), name)(
        job.spec_json,
        dcp_dir=job.dcp_dir,
        rank=rank,
        world_size=world_size,
        rendezvous=f"file://{rendezvous}",
        threads=1,
    )
    try:
        if job.mean_over_ranks:
            numerics.tree_sum = lambda parts: tree_sum(parts) / len(parts)
        if job.load:
            trainer.load(job.load)
        log: Log = {}
        for step in job.steps:
            samples = made_samples(step)
            root = trainer.score(samples)
            size = len(samples) // job.updates
            for update in range(job.updates):
                record = trainer.update(
                    samples[update * size : (update + 1) * size],
                    step=step,
                    update=update,
                    keep_to=job.keep_to if not log else None,
                )
                metrics = {name: value.hex() for name, value in record.metrics.items()}
                log[f"{step}.{update}"] = {
                    "train_logprobs": root,
                    "metrics": metrics,
                    **{probe: dict(names) for probe, names in record.digests.items()},
                }
            log[f"{step}.state"] = trainer.state_digest()
            if job.save and step == 2:
                trainer.save(job.save, chain_digest="c" * 32, attempt=1)
        log["wire"] = {name: digest_tensor(name, t) for name, t in trainer.wire_tensors()}
        return log
    finally:
        numerics.tree_sum = tree_sum
        trainer.close()


def run_ranks(folder: Path, jobs: list[Job], *, world_size: int) -> dict[str, Log]:
    """Run the jobs on fresh processes, one after the other; return job name -> log of rank 0."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "jobs.json"
    file.write_text(json.dumps([asdict(job) for job in jobs]))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "77",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }
    program = [sys.executable, "-m", "tests.engines.rank_program"]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(world_size), str(file)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    answers = [process.communicate(timeout=500) for process in ranks]
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    logs: dict[str, Log] = json.loads((folder / "jobs.json.result").read_text())
    return logs


def main() -> None:
    """Run this rank's part of all jobs; rank 0 writes the logs."""
    rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    logs = {}
    for values in json.loads(file.read_text()):
        job = Job(**values)
        rendezvous = file.with_name(f"{job.name}.rendezvous")
        logs[job.name] = run_job(job, rank=rank, world_size=world_size, rendezvous=rendezvous)
    if rank == 0:
        file.with_name(file.name + ".result").write_text(json.dumps(logs))


if __name__ == "__main__":
    main()
