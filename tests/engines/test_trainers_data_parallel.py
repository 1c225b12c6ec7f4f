"""The four data-parallel cases on 1, 2 and 4 ranks of each trainer: one digest of everything.

GRPO; tied embeddings with a per-token loss; KL to a reference; and the tensors that one step keeps.
A mixture of experts beside them, also with its slots cut into micro-batches.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from engines.train.registry import TRAINERS
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import RunSpec
from model_specs.trainer_options import TrainerOptions
from tests.engines.rank_program import Job, Log, run_ranks
from tests.engines.trainer_cases import LLAMA, QWEN2, QWEN3, QWEN3_MOE, make_spec, write_model

pytestmark = pytest.mark.exhaustive

WORLD_SIZES = (1, 2, 4)
ODD = {"vocab_size": 101, "intermediate_size": 177}
"""So that ranks own unequal shards."""


def case_spec(model: ModelSpec, **loss: Any) -> RunSpec:
    return make_spec("bfloat16", model=model.model_copy(update=ODD), slots=4, **loss)


CASES: dict[str, RunSpec] = {
    "grpo": case_spec(LLAMA, reference=False, aggregation="per_sample"),
    "tied, per token": case_spec(QWEN2, reference=False, entropy_coef=0.01),
    "KL and reference": case_spec(QWEN3, kl_coef=0.1, kl_type="k3"),
    "mixture of experts": case_spec(QWEN3_MOE, kl_coef=0.1),
    "experts in micro-batches": case_spec(QWEN3_MOE, kl_coef=0.1).model_copy(
        update={"trainer_options": TrainerOptions(max_tokens_per_rank=128)}
    ),
    "dump of a step": case_spec(QWEN2, kl_coef=1.0, kl_type="k1"),
}
SAME = {"experts in micro-batches": "mixture of experts"}
"""Case -> another whose bits it must have."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cases")
    for name, spec in CASES.items():
        write_model(made / name, spec.model)
    return made


@pytest.fixture(scope="module")
def logs(folder: Path) -> dict[int, dict[str, Log]]:
    """World size -> `<trainer> <case>` -> log."""
    return {
        size: run_ranks(folder / str(size), jobs(folder, size), world_size=size)
        for size in WORLD_SIZES
    }


def jobs(folder: Path, world_size: int) -> list[Job]:
    return [
        Job(
            name=f"{trainer} {name}",
            spec_json=spec.model_copy(update={"trainer": trainer}).model_dump_json(),
            dcp_dir=str(folder / name / "dcp"),
            steps=(1, 2),
            keep_to=str(dump(folder, world_size, trainer)) if name == "dump of a step" else None,
        )
        for trainer in TRAINERS
        for name, spec in CASES.items()
    ]


def dump(folder: Path, world_size: int, trainer: str) -> Path:
    return folder / f"dump-{world_size}-{trainer}"


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_ranks_of_any_trainer_gives_one_digest(
    name: str, trainer: str, logs: dict[int, dict[str, Log]]
) -> None:
    expected = logs[1][f"fsdp2 {SAME.get(name, name)}"]
    assert len(expected) == 5
    for world_size in WORLD_SIZES:
        found = logs[world_size][f"{trainer} {name}"]
        for moment, digests in expected.items():
            assert found[moment] == digests, (world_size, moment)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_kept_tensors_of_a_step_are_the_same_files(
    trainer: str, folder: Path, logs: dict[int, dict[str, Log]]
) -> None:
    assert logs
    found = [files(dump(folder, world_size, trainer)) for world_size in WORLD_SIZES]
    assert set(found[0]) == {
        f"{probe}.safetensors" for probe in ("loss", "grads", "grad_norm", "optimizer", "weights")
    }
    assert found[0] == found[1] == found[2] == files(dump(folder, 1, "fsdp2"))


def files(path: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.iterdir())}


@pytest.mark.slow
def test_the_cases_differ_and_move(logs: dict[int, dict[str, Log]]) -> None:
    """The control: what is equal above is not equal everywhere."""
    different = [name for name in CASES if name not in SAME]
    states = [logs[1][f"fsdp2 {name}"][f"{step}.state"] for name in different for step in (1, 2)]
    assert len(set(states)) == 2 * len(different)
    for name in CASES:
        metrics = logs[4][f"megatron {name}"]["2.0"]["metrics"]
        assert float.fromhex(metrics["train/grad_norm"]) > 1e-2
