"""A trainer's step on the device: packing, repeats, recomputation, parts of a slot, float64.

Every trainer of the product in this process, on small random models, dense and a mixture of
experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines.contracts import TrainSample
from engines.provenance.digest import root_digest
from engines.train.registry import TRAINERS
from engines.train.shards import merged_digests
from engines.train.trainer import GrpoTrainer
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EXPERTS = {
    "num_experts": 8, "experts_per_token": 3, "intermediate_size": 96, "normalize_weights": True,
}  # fmt: skip
FAMILIES = {
    "qwen2": (),
    "qwen3_moe": (
        "model.family=qwen3_moe", "model.qk_norm=true", "model.qkv_bias=false",
        f"model.moe={json.dumps(EXPERTS)}",
    ),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[(trainer, family) for trainer in sorted(TRAINERS) for family in sorted(FAMILIES)],
    ids="-".join,
)
def spec(request: pytest.FixtureRequest) -> RunSpec:
    trainer, family = request.param
    return apply_overrides(
        load_recipe("tiny_cpu"),
        (
            "execution.device=cuda", "reduction.slots=2", "loss.reference=false",
            f"trainer={trainer}", *FAMILIES[family],
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"{spec.trainer}-{spec.model.family}")


@pytest.fixture(scope="module")
def chosen(spec: RunSpec) -> list[TrainSample]:
    """Prompts of 1 to 89 tokens: sequences of one block of rows and of two."""
    from tools.gpu.local_trainer import samples

    return samples(spec, 8, prompt=(1, 90))


@pytest.fixture
def trainer(spec: RunSpec, folder: Path) -> Iterator[GrpoTrainer]:
    from tools.gpu.local_trainer import started

    with started(spec, folder) as made:
        yield made


def gradient_root(trainer: GrpoTrainer, samples: list[TrainSample]) -> str:
    gradients, _ = trainer._gradients(samples)
    assert float(trainer._norm(gradients)) > 1e-3
    return root_digest(merged_digests(gradients))


def test_a_token_scores_the_same_in_any_packing(
    trainer: GrpoTrainer, chosen: list[TrainSample]
) -> None:
    trainer.score(chosen)
    packed = trainer.scores()
    trainer.score(chosen[::-1])
    assert trainer.scores() == packed
    for sample in chosen:
        trainer.score([sample])
        assert trainer.scores()[sample.request_id] == packed[sample.request_id]
    assert sum(len(scores) for scores in packed.values()) > 60


def test_a_reference_takes_no_device_memory_and_scores_as_the_initial_weights(
    spec: RunSpec, folder: Path, chosen: list[TrainSample]
) -> None:
    from tools.gpu.local_trainer import started

    wanted = apply_overrides(spec, ("loss.reference=true", "optimizer.lr=1e-3"))
    with started(wanted, folder) as made:
        reference = made._reference
        assert reference is not None
        rows = list(reference.rows())
        assert {(row.device.type, row.is_pinned()) for row in rows} == {("cpu", True)}
        made.score(chosen)
        initial = made.scores()
        assert made.reference_scores() == initial
        made.update(chosen, step=1, update=0)
        weights = made.weight_digests()
        before = torch.cuda.memory_allocated()
        with reference.swapped_in(made._shards):
            assert torch.cuda.memory_allocated() == before
            assert made.weight_digests() != weights
        assert torch.cuda.memory_allocated() == before
        assert made.weight_digests() == weights
        made.score(chosen)
        assert made.reference_scores() == initial != made.scores()


def test_fifty_backwards_of_a_step_beside_a_second_stream_have_one_outcome(
    trainer: GrpoTrainer, chosen: list[TrainSample]
) -> None:
    trainer.score(chosen)
    noise, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
    outcomes = set()
    for _ in range(50):
        with torch.cuda.stream(noise):
            for _ in range(8):
                busy = (busy @ busy).mul_(1e-3)
        outcomes.add(gradient_root(trainer, chosen))
    torch.cuda.synchronize()
    assert len(outcomes) == 1
    # The control: other samples have another gradient.
    assert gradient_root(trainer, [*chosen[4:], *chosen[:4]][:4]) not in outcomes


def test_recomputation_and_parts_of_a_slot_change_no_bit(
    spec: RunSpec, folder: Path, chosen: list[TrainSample]
) -> None:
    from tools.gpu.local_trainer import started

    found = {}
    for name, settings in {
        "whole": (),
        "recomputed": ("trainer_options.gradient_checkpointing=true",),
        "in parts": ("trainer_options.max_tokens_per_rank=128",),
    }.items():
        with started(apply_overrides(spec, settings), folder) as made:
            made.score(chosen)
            found[name] = gradient_root(made, chosen)
    assert len(set(found.values())) == 1, found


def test_a_float32_step_has_the_gradient_of_float64(
    spec: RunSpec, folder: Path, chosen: list[TrainSample]
) -> None:
    """No TF32 anywhere: it would show at a thousand times the bound."""
    from tools.gpu.float64_replay import replay

    wanted = apply_overrides(spec, ("numerics.compute_dtype=float32",))
    report = replay(wanted, 8, folder)
    assert report["bits_with_and_without_checkpointing"] == "equal"
    assert report["tf32"]["cuda.matmul"] is False
    assert report["norm"] > 1e-2
    assert abs(report["norm_error"]) < 1e-6
    assert max(report["worst_tensor"].values()) < 1e-5
