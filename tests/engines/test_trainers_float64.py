"""Every trainer's gradient against an independent float64 computation of the same loss.

The reference is unsharded and unpacked, and shares no code with the trainers. Bounds were fixed
beforehand. float32: the norm within 1e-6, each parameter within 5e-6 and within 4 times the error
of stock float32 transformers. bfloat16: the norm within 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import numerics
from engines.contracts import TrainSample
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from model_specs.model_spec import ModelSpec
from tests.engines.reference_model import plain_logits
from tests.engines.trainer_cases import (
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    current_weights,
    made_samples,
    make_spec,
    plain_loss,
    started,
    stock_gradients,
    stock_model,
    write_model,
)

NORM_FLOAT32, NORM_BFLOAT16 = 1e-6, 1e-2
PARAMETER_FLOAT32, TIMES_STOCK = 5e-6, 4.0

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss, and where it is looked at."""

    name: str
    loss: dict[str, Any] = field(default_factory=dict)
    advantages: bool = False
    lr: float = 0.0
    """Of one update beforehand, so that policy and reference differ; 0 makes none."""


CASES = (
    Case(name="entropy only", loss={"entropy_coef": 1.0}),
    Case(name="KL, reference = actor", loss={"kl_coef": 1.0, "kl_type": "k1"}),
    Case(name="KL, reference != actor", loss={"kl_coef": 1.0}, lr=1e-3),
    Case(name="policy gradient, clipping", advantages=True, lr=2e-4),
)

BFLOAT16_CASES = (
    CASES[1],
    Case(name="policy gradient", advantages=True),
    Case(name="policy gradient and KL", loss={"kl_coef": 1.0, "kl_type": "k1"}, advantages=True),
)
"""On policy: off policy the rounding of a log-prob decides on which side of a bound a token is."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    return {
        m.family: write_model(tmp_path_factory.mktemp(m.family), m)
        for m in (QWEN2, QWEN3, QWEN3_MOE)
    }


def true_gradient(
    trainer: GrpoTrainer, samples: list[TrainSample], *, on_policy: bool
) -> Gradients:
    weights = current_weights(trainer, torch.float64)
    spec = trainer.spec.model
    plain_loss(
        lambda ids: plain_logits(weights, ids, spec), samples, trainer, on_policy=on_policy
    ).backward()
    return taken(weights)


def taken(leaves: dict[str, torch.Tensor]) -> Gradients:
    """The gradients in float64; a leaf that the loss does not reach fails here."""
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        gradients[name] = leaf.grad.double()
    return gradients


def norm(gradients: Gradients) -> float:
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


def errors(gradients: Gradients, true: Gradients) -> dict[str, float]:
    return {name: float((gradients[name] - g).norm() / g.norm()) for name, g in true.items()}


def measured(
    case: Case, dtype: str, model: ModelSpec, name: str, folder: Path, scratch: Path
) -> tuple[Gradients, Gradients, Gradients, float]:
    """Return the trainer's, true and stock float32 gradients, and the share that is clipped."""
    spec = make_spec(dtype, model=model, lr=case.lr or 1e-3, **case.loss)
    spec = spec.model_copy(update={"trainer": name})
    moving = made_samples()
    samples = [replace(s, advantage=s.advantage if case.advantages else 0.0) for s in moving]
    with started(spec, folder, scratch) as trainer:
        trainer.score(moving)
        if case.lr:
            trainer.update(moving, step=1, update=0)
        true = true_gradient(trainer, samples, on_policy=not case.lr)
        stock = stock_model(trainer, torch.float32)
        plain_loss(lambda ids: stock(ids[None]).logits[0], samples, trainer).backward()
        shards, figures = trainer._gradients(samples)
    ours = {name: shard.local.double() for name, shard in shards.items()}
    of_stock = {name: gradient.double() for name, gradient in stock_gradients(stock).items()}
    clipped = sum(figure.figures["pg_clipfrac"] for figure in figures)
    return ours, true, of_stock, clipped


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(QWEN2, id="qwen2"),
        pytest.param(QWEN3, id="qwen3", marks=pytest.mark.exhaustive),
        pytest.param(QWEN3_MOE, id="qwen3_moe", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_gradient_is_within_the_bounds_of_float64(
    case: Case, model: ModelSpec, trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[model.family]
    ours, true, stock, clipped = measured(case, "float32", model, trainer, folder, tmp_path)
    assert all(bool(g.abs().max() > 0) for g in true.values()), "vacuous: a true gradient is zero"
    assert norm(true) > 1e-2
    if case.advantages:
        assert 0.05 < clipped < 0.95, "vacuous: clipping is not active, or everything is clipped"
    assert abs(norm(ours) / norm(true) - 1) < NORM_FLOAT32
    of_ours, of_stock = errors(ours, true), errors(stock, true)
    assert max(of_ours.values()) < PARAMETER_FLOAT32, max(of_ours, key=lambda n: of_ours[n])
    ratios = {name: of_ours[name] / of_stock[name] for name in true}
    assert max(ratios.values()) < TIMES_STOCK, max(ratios, key=lambda n: ratios[n])


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("case", BFLOAT16_CASES, ids=lambda case: case.name)
def test_bfloat16_gradient_norm_is_within_one_percent_of_float64(
    case: Case, trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    ours, true, _, _ = measured(case, "bfloat16", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert norm(true) > 1e-2
    assert abs(norm(ours) / norm(true) - 1) < NORM_BFLOAT16


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_layer_that_loses_its_residual_is_outside_of_the_bounds(
    trainer: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = numerics.add, count()

    def add(residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Four additions a forward: the third is the second layer's after its attention."""
        return output if next(calls) % 4 == 2 else honest(residual, output)

    monkeypatch.setattr(numerics, "add", add)
    ours, true, _, _ = measured(CASES[0], "float32", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert abs(norm(ours) / norm(true) - 1) > 100 * NORM_FLOAT32
    assert max(errors(ours, true).values()) > 100 * PARAMETER_FLOAT32


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_norm_with_another_epsilon_is_outside_of_the_bounds(
    trainer: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = numerics.rms_norm
    monkeypatch.setattr(numerics, "rms_norm", lambda x, w, eps: honest(x, w, 2 * eps))
    ours, true, _, _ = measured(CASES[0], "float32", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert max(errors(ours, true).values()) > PARAMETER_FLOAT32
