"""One rank = two ranks = a resumed run, bit for bit, in float32 and bfloat16.

This module is also the program of one rank: `python <this file> RANK WORLD_SIZE JOBS.json` runs
the jobs in a process of its own, which makes every resumed job a resume in a fresh process.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.checkpoint.convert import convert_hf_to_dcp
from engines.checkpoint.tiny_model import write_tiny_model
from engines.contracts import TrainSample
from engines.train.fsdp2.actor import Fsdp2Trainer
from model_specs.errors import SpecError
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import (
    DataSpec,
    ExecutionSpec,
    LossSpec,
    NumericsSpec,
    OptimizerSpec,
    PlanSpec,
    RewardSpec,
    RunSpec,
    SamplingSpec,
    ScheduleSpec,
    StockReduction,
    TreeReduction,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSpec(
    family="qwen2",
    path="generated:tiny",
    num_layers=2,
    hidden_size=64,
    intermediate_size=177,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=101,
    max_position_embeddings=256,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    dtype="bfloat16",
)
"""Odd sizes, so that two ranks own unequal shards."""


def make_spec(dtype: str, *, ranks: int = 1, stock: bool = False) -> RunSpec:
    return RunSpec(
        recipe="test",
        model=MODEL,
        data=DataSpec(source="generated:arithmetic", prompts_per_step=4, max_prompt_tokens=96),
        sampling=SamplingSpec(samples_per_prompt=4, max_new_tokens=24, temperature=0.8),
        reward=RewardSpec(name="digits"),
        loss=LossSpec(reference=True, kl_coef=0.05, entropy_coef=0.01, updates_per_step=2),
        optimizer=OptimizerSpec(lr=3e-3, clip_grad=0.5),
        schedule=ScheduleSpec(kind="cosine", warmup_samples=16, horizon_samples=200),
        reduction=StockReduction(slots=4, world_size=ranks) if stock else TreeReduction(slots=4),
        numerics=NumericsSpec.model_validate({"compute_dtype": dtype}),
        plan=PlanSpec(num_steps=4, checkpoint_every=2),
        execution=ExecutionSpec(trainer_ranks=ranks),
    )


def made_samples(step: int, count: int = 16) -> list[TrainSample]:
    """Samples of uneven lengths from a hash, equal in every process."""

    def draw(*labels: object, below: int) -> int:
        return int.from_bytes(hashlib.sha256(repr(labels).encode()).digest()[:8], "big") % below

    return [
        TrainSample(
            request_id=f"{step}/train-{i // 4}/{i % 4}",
            prompt_token_ids=tuple(
                draw(step, i, "p", k, below=101) for k in range(3 + draw(step, i, "P", below=80))
            ),
            token_ids=tuple(
                draw(step, i, "c", k, below=101) for k in range(1 + draw(step, i, "C", below=30))
            ),
            advantage=(draw(step, i, "a", below=9) - 4) / 4,
        )
        for i in range(count)
    ]


def run_job(job: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Train over the job's steps; return everything that must not depend on how it was run."""
    spec = RunSpec.model_validate_json(Path(job["spec"]).read_text())
    trainer = Fsdp2Trainer(
        spec.model_dump_json(),
        dcp_dir=job["dcp"],
        rank=rank,
        world_size=world_size,
        rendezvous=f"file://{job['name']}.rendezvous.{world_size}",
        threads=1,
    )
    try:
        if job["load"]:
            trainer.load(job["load"])
        log: dict[str, Any] = {}
        for step in job["steps"]:
            samples = made_samples(step)
            root = trainer.score(samples)
            for update in (0, 1):
                batch = samples[update * 8 : update * 8 + 8]
                record = trainer.update(batch, step=step, update=update)
                metrics = {name: value.hex() for name, value in record.metrics.items()}
                log[f"{step}.{update}"] = {
                    "train_logprobs": root,
                    "metrics": metrics,
                    **{probe: dict(names) for probe, names in record.digests.items()},
                }
            log[f"{step}.state"] = trainer.state_digest()
            if job["save"] and step == 2:
                trainer.save(job["save"], chain_digest="c" * 32, attempt=1)
        return log
    finally:
        trainer.close()


def job(folder: Path, dtype: str, name: str, steps: list[int], **paths: Path) -> dict[str, Any]:
    return {
        "name": str(folder / f"{dtype}-{name}"),
        "spec": str(folder / f"spec-{name if 'stock' in name else dtype}.json"),
        "dcp": str(folder / "dcp"),
        "steps": steps,
        "load": str(paths["load"]) if "load" in paths else None,
        "save": str(paths["save"]) if "save" in paths else None,
    }


def run_two_ranks(folder: Path, jobs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run the jobs on two fresh processes; return the last part of a job's name -> its log."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "77",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), "2", str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=400) for process in ranks]
    for process, (_, errors) in zip(ranks, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    results: dict[str, dict[str, Any]] = json.loads((folder / "jobs.json.result").read_text())
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every trajectory the tests compare, by `<dtype>-<name>`."""
    folder = tmp_path_factory.mktemp("ranks")
    write_tiny_model(folder / "hf", MODEL)
    convert_hf_to_dcp(folder / "hf", folder / "dcp", MODEL)
    for dtype in ("float32", "bfloat16"):
        (folder / f"spec-{dtype}.json").write_text(make_spec(dtype).model_dump_json())
    for ranks in (1, 2):
        stock = make_spec("float32", ranks=ranks, stock=True)
        (folder / f"spec-stock-{ranks}.json").write_text(stock.model_dump_json())
    logs: dict[str, dict[str, Any]] = {}
    logs["float32-stock-1"] = run_job(job(folder, "float32", "stock-1", [1]), 0, 1)
    two: list[dict[str, Any]] = [job(folder, "float32", "stock-2", [1])]
    for dtype in ("float32", "bfloat16"):
        one = job(folder, dtype, "one", [1, 2, 3, 4], save=folder / f"{dtype}-by-one")
        logs[f"{dtype}-one"] = run_job(one, 0, 1)
        two += [
            job(folder, dtype, "two", [1, 2, 3, 4], save=folder / f"{dtype}-by-two"),
            job(folder, dtype, "one-then-two", [3, 4], load=folder / f"{dtype}-by-one"),
        ]
    logs |= run_two_ranks(folder, two)
    for dtype in ("float32", "bfloat16"):
        back = job(folder, dtype, "two-then-one", [3, 4], load=folder / f"{dtype}-by-two")
        logs[f"{dtype}-two-then-one"] = run_job(back, 0, 1)
    return logs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_every_bit_of_one_rank(dtype: str, runs: dict[str, Any]) -> None:
    one, two = runs[f"{dtype}-one"], runs[f"{dtype}-two"]
    assert len(one) == 12
    for moment, expected in one.items():
        assert two[moment] == expected, moment


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_resumed_run_on_another_number_of_ranks_goes_on_bit_for_bit(
    dtype: str, name: str, runs: dict[str, Any]
) -> None:
    whole, resumed = runs[f"{dtype}-one"], runs[f"{dtype}-{name}"]
    assert sorted(resumed) == [f"{s}.{k}" for s in (3, 4) for k in ("0", "1", "state")]
    for moment, got in resumed.items():
        assert got == whole[moment], moment


@pytest.mark.slow
def test_under_the_stock_reduction_the_number_of_ranks_decides_bits(runs: dict[str, Any]) -> None:
    """One rank adds ((a + b) + c) + d, two ranks add (a + b) + (c + d), which the tree does too."""
    one, two = runs["float32-stock-1"]["1.0"], runs["float32-stock-2"]["1.0"]
    assert one["train_logprobs"] == two["train_logprobs"]
    assert one["loss"] == two["loss"]
    assert one["grads"] != two["grads"]
    assert two["grads"] == runs["float32-one"]["1.0"]["grads"]
    norms = [float.fromhex(log["metrics"]["train/grad_norm"]) for log in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
def test_trajectories_move_and_dtypes_differ(runs: dict[str, Any]) -> None:
    """The control of this module: equalities above are not between things that never change."""
    for dtype in ("float32", "bfloat16"):
        log = runs[f"{dtype}-one"]
        assert len({log[f"{step}.state"] for step in (1, 2, 3, 4)}) == 4
        norms = [float.fromhex(log[f"{s}.0"]["metrics"]["train/grad_norm"]) for s in (1, 2, 3, 4)]
        assert all(norm > 1e-3 for norm in norms)
        assert float.fromhex(log["1.1"]["metrics"]["train/ppo_kl"]) != 0.0
    assert runs["float32-one"]["4.state"] != runs["bfloat16-one"]["4.state"]


def test_stock_reduction_at_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    spec = make_spec("float32", ranks=2, stock=True)
    trainer_spec = spec.model_copy(update={"execution": ExecutionSpec(trainer_ranks=1)})
    write_tiny_model(tmp_path / "hf", MODEL)
    convert_hf_to_dcp(tmp_path / "hf", tmp_path / "dcp", MODEL)
    import torch.distributed as dist

    try:
        with pytest.raises(SpecError, match=r"world_size=2 .* 1 ranks"):
            Fsdp2Trainer(
                trainer_spec.model_dump_json(),
                dcp_dir=str(tmp_path / "dcp"),
                rank=0,
                world_size=1,
                rendezvous=f"file://{tmp_path}/rendezvous",
            )
    finally:
        dist.destroy_process_group()


def main() -> None:
    rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    jobs = json.loads(file.read_text())
    results = {Path(one["name"]).name: run_job(one, rank, world_size) for one in jobs}
    if rank == 0:
        file.with_name(file.name + ".result").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
