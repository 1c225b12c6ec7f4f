"""One rank = two ranks = a resumed run, bit for bit, on every trainer, in float32 and bfloat16.

Every trajectory runs in fresh processes (`rank_program`), so each resumed one is a resume there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.train.fsdp2.actor import Fsdp2Trainer
from engines.train.registry import TRAINERS
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
from tests.engines.rank_program import Job, Log, run_ranks
from tests.engines.trainer_cases import DTYPES, write_model

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


def make_spec(
    dtype: str, *, trainer: str = "fsdp2", ranks: int = 1, stock: bool = False
) -> RunSpec:
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
    ).model_copy(update={"trainer": trainer})


def job(folder: Path, trainer: str, dtype: str, name: str, **settings: Any) -> Job:
    spec = make_spec(dtype, trainer=trainer)
    return Job(
        name=f"{trainer}-{dtype}-{name}",
        spec_json=spec.model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        updates=2,
        **settings,
    )


def stock_job(folder: Path, trainer: str, ranks: int) -> Job:
    spec = make_spec("float32", trainer=trainer, ranks=ranks, stock=True)
    return Job(
        name=f"{trainer}-float32-stock-{ranks}",
        spec_json=spec.model_dump_json(),
        dcp_dir=str(folder / "dcp"),
        steps=(1,),
        updates=2,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Log]:
    """Every trajectory the tests compare, by `<trainer>-<dtype>-<name>`."""
    folder = tmp_path_factory.mktemp("ranks")
    write_model(folder, MODEL)
    one, two, back = [], [], []
    for trainer in TRAINERS:
        one.append(stock_job(folder, trainer, 1))
        two.append(stock_job(folder, trainer, 2))
        for dtype in DTYPES:
            place = folder / f"{trainer}-{dtype}"
            whole, later = (1, 2, 3), (3,)
            save, load = f"{place}-by-one", f"{place}-by-two"
            one.append(job(folder, trainer, dtype, "one", steps=whole, save=save))
            two.append(job(folder, trainer, dtype, "two", steps=whole, save=load))
            two.append(job(folder, trainer, dtype, "one-then-two", steps=later, load=save))
            back.append(job(folder, trainer, dtype, "two-then-one", steps=later, load=load))
    logs = run_ranks(folder / "1", one, world_size=1)
    logs |= run_ranks(folder / "2", two, world_size=2)
    return logs | run_ranks(folder / "3", back, world_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_give_every_bit_of_one_rank(
    dtype: str, trainer: str, runs: dict[str, Log]
) -> None:
    one, two = runs[f"{trainer}-{dtype}-one"], runs[f"{trainer}-{dtype}-two"]
    assert len(one) == 10
    for moment, expected in one.items():
        assert two[moment] == expected, moment


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["one-then-two", "two-then-one"])
def test_resumed_run_on_another_number_of_ranks_goes_on_bit_for_bit(
    dtype: str, trainer: str, name: str, runs: dict[str, Log]
) -> None:
    whole, resumed = runs[f"{trainer}-{dtype}-one"], runs[f"{trainer}-{dtype}-{name}"]
    assert sorted(resumed) == [*(f"3.{k}" for k in ("0", "1", "state")), "wire"]
    for moment, got in resumed.items():
        assert got == whole[moment], moment


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_under_the_stock_reduction_the_number_of_ranks_decides_bits(
    trainer: str, runs: dict[str, Log]
) -> None:
    """One rank adds ((a + b) + c) + d, two ranks add (a + b) + (c + d), which the tree does too."""
    one, two = (runs[f"{trainer}-float32-stock-{ranks}"]["1.0"] for ranks in (1, 2))
    assert one["train_logprobs"] == two["train_logprobs"]
    assert one["loss"] == two["loss"]
    assert one["grads"] != two["grads"]
    assert two["grads"] == runs[f"{trainer}-float32-one"]["1.0"]["grads"]
    norms = [float.fromhex(log["metrics"]["train/grad_norm"]) for log in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_trainer_gives_the_bits_of_every_other(dtype: str, runs: dict[str, Log]) -> None:
    assert runs[f"megatron-{dtype}-two"] == runs[f"fsdp2-{dtype}-one"]


@pytest.mark.slow
def test_trajectories_move_and_dtypes_differ(runs: dict[str, Log]) -> None:
    """The control of this module: equalities above are not between things that never change."""
    for dtype in ("float32", "bfloat16"):
        log = runs[f"fsdp2-{dtype}-one"]
        assert len({log[f"{step}.state"] for step in (1, 2, 3)}) == 3
        norms = [float.fromhex(log[f"{s}.0"]["metrics"]["train/grad_norm"]) for s in (1, 2, 3)]
        assert all(norm > 1e-3 for norm in norms)
        assert float.fromhex(log["1.1"]["metrics"]["train/ppo_kl"]) != 0.0
    assert runs["fsdp2-float32-one"]["3.state"] != runs["fsdp2-bfloat16-one"]["3.state"]


def test_stock_reduction_at_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    spec = make_spec("float32", ranks=2, stock=True)
    write_model(tmp_path, MODEL)
    import torch.distributed as dist

    try:
        with pytest.raises(SpecError, match=r"world_size=2 .* 1 ranks"):
            Fsdp2Trainer(
                spec.model_dump_json(),
                dcp_dir=str(tmp_path / "dcp"),
                rank=0,
                world_size=1,
                rendezvous=f"file://{tmp_path}/rendezvous",
            )
    finally:
        dist.destroy_process_group()
