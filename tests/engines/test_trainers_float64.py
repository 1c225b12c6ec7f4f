"""Every trainer's gradient against an independent float64 computation of the same loss.

The reference is unsharded and unpacked, and shares no code with the trainers. The bounds below were
fixed before anything was measured; a true gradient of zero is vacuous, whatever the trainer's is.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import numerics
from engines.contracts import TrainSample
from engines.train import trainer as trainer_module
from engines.train.grpo import TokenTerms
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import LossSpec, RunSpec
from tests.engines.reference_model import plain_logits
from tests.engines.trainer_cases import (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    current_weights,
    made_samples,
    make_spec,
    plain_loss,
    plain_losses,
    rewarded_samples,
    started,
    stock_gradients,
    stock_model,
    write_model,
)

logger = logging.getLogger(__name__)

NORM_FLOAT32 = 1e-6
"""float32: relative error of the norm of the whole gradient."""
PARAMETER_FLOAT32 = 5e-6
"""float32: relative error of each parameter's gradient."""
TIMES_STOCK = 4.0
"""float32: the same, in errors of stock float32 transformers."""
NORM_BFLOAT16 = 1e-2
"""bfloat16: relative error of the norm, of each trainer."""
MUTUAL_BFLOAT16 = 2e-2
"""bfloat16: relative difference of two trainers' norms."""
TRAINED_TOKENS = 20_000
"""Of an update off policy, in bfloat16; fixed beforehand, from this reasoning.

One update moves a log-prob by about as much as bfloat16 rounds it, so off policy rounding decides
on which side of a clip bound, or of the router's top-k, single tokens fall. Such flips are errors
of no common direction: over N tokens they add up to sqrt(N) of one, while the gradient of a loss
that has a signal adds up to N, so the error of the norm falls about as 1 / sqrt(N). A batch of 89
tokens showed up to 6.5 %; 20,000 ought to show 6.5 % * sqrt(89 / 20,000) = 0.4 %, well inside of
the bound, and steps in earnest have 5,000 to 100,000. Advantages drawn at random would void the
argument, since their gradient is noise that falls as the flips do: `rewarded_samples` has a signal.

That it is the clip decisions, and not the arithmetic, is a test of its own: with the trainer's
decisions given to the reference, a tenth of the tokens is within the bound in dense models.
"""
DECIDED_TOKENS = 2_000
"""Of an update off policy whose clip decisions are given."""
SCORE_FLOAT32 = 1e-5
"""float32: error of a log-prob, in nats."""
LEAST_NORM = 1e-2
"""A true gradient below this is vacuous."""

FAMILIES = (QWEN2, LLAMA, QWEN3, QWEN3_MOE)

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
    *CASES[:2],
    Case(name="policy gradient", advantages=True),
    Case(name="policy gradient and KL", loss={"kl_coef": 1.0, "kl_type": "k1"}, advantages=True),
)
"""On policy: off policy the rounding of a log-prob decides on which side of a bound a token is."""

OFF_POLICY_CASES = (
    CASES[2],
    replace(CASES[3], lr=5e-4),
    Case(
        name="clipping and KL",
        loss={"kl_coef": 1.0, "kl_type": "k1"},
        advantages=True,
        lr=5e-4,
    ),
)
"""With the rate at which a quarter of so many tokens is clipped; at 2e-4 less than 3 % are."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> folder with `hf` and `dcp`."""
    return {m.family: write_model(tmp_path_factory.mktemp(m.family), m) for m in FAMILIES}


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


def require_within(ours: Gradients, true: Gradients, stock: Gradients) -> None:
    """The float32 bounds; AssertionError that says `vacuous` or names bound and parameter."""
    require_real(true)
    of_norm = abs(norm(ours) / norm(true) - 1)
    assert of_norm < NORM_FLOAT32, f"norm: {of_norm} is not below {NORM_FLOAT32}"
    of_ours, of_stock = errors(ours, true), errors(stock, true)
    ratios = {name: of_ours[name] / of_stock[name] for name in true}
    for what, found, bound in (
        ("error", of_ours, PARAMETER_FLOAT32),
        ("times stock", ratios, TIMES_STOCK),
    ):
        worst = max(found, key=lambda name: found[name])
        assert found[worst] < bound, f"{what} of {worst}: {found[worst]} is not below {bound}"


def require_real(true: Gradients) -> None:
    zero = [name for name, gradient in true.items() if not bool(gradient.any())]
    assert not zero, f"vacuous: the true gradient of {zero} is zero"
    assert norm(true) > LEAST_NORM, f"vacuous: the true gradient's norm is {norm(true)}"


ROWS = [
    pytest.param(model, id=model.family, marks=() if model is QWEN2 else pytest.mark.exhaustive)
    for model in FAMILIES
]


DENSE_ROWS = ROWS[:-1]
"""Where experts are chosen is a decision too, which the reference cannot be given."""
assert FAMILIES[-1] is QWEN3_MOE

OFF_POLICY_ROWS = [
    pytest.param(model, case, id=f"{model.family}-{case.name}", marks=pytest.mark.exhaustive)
    for model in FAMILIES
    for case in OFF_POLICY_CASES
]


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("model", ROWS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_gradient_is_within_the_bounds_of_float64(
    case: Case, model: ModelSpec, trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[model.family]
    ours, true, stock, clipped = measured(case, "float32", model, trainer, folder, tmp_path)
    if case.advantages:
        assert 0.05 < clipped < 0.95, "vacuous: clipping is not active, or everything is clipped"
    require_within(ours, true, stock)


@pytest.mark.parametrize("model", ROWS)
@pytest.mark.parametrize("case", BFLOAT16_CASES, ids=lambda case: case.name)
def test_bfloat16_norms_are_within_one_percent_of_float64_and_two_of_each_other(
    case: Case, model: ModelSpec, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, norms = folders[model.family], {}
    for trainer in sorted(TRAINERS):
        ours, true, _, _ = measured(case, "bfloat16", model, trainer, folder, tmp_path)
        require_real(true)
        norms[trainer] = norm(ours)
    require_norms_within(norms, norm(true))


@pytest.mark.parametrize(("model", "case"), OFF_POLICY_ROWS)
def test_bfloat16_norms_off_policy_are_within_the_same_bounds_over_many_tokens(
    case: Case, model: ModelSpec, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = off_policy(case, model, TRAINED_TOKENS, folders[model.family], tmp_path)
    require_norms_within(found.norms, norm(found.gradient()))


@pytest.mark.parametrize("model", DENSE_ROWS)
@pytest.mark.parametrize("case", OFF_POLICY_CASES[1:], ids=lambda case: case.name)
def test_bfloat16_norms_off_policy_are_within_the_bounds_where_clip_decisions_are_given(
    case: Case, model: ModelSpec, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = off_policy(case, model, DECIDED_TOKENS, folders[model.family], tmp_path)
    require_norms_within(found.norms, norm(found.gradient(deciding=found.now)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_the_row_with_the_largest_error_is_within_the_bounds_with_other_samples_too(
    seed: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    case, folder = OFF_POLICY_CASES[1], folders[LLAMA.family]
    found = off_policy(case, LLAMA, TRAINED_TOKENS, folder, tmp_path, seed=seed)
    for true in (found.gradient(), found.gradient(deciding=found.now)):
        require_norms_within(found.norms, norm(true))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """The trainers' gradients after one update, and what the reference needs for the true one."""

    norms: dict[str, float]
    """Trainer -> norm of its gradient."""
    weights: dict[str, torch.Tensor]
    """bfloat16, after the update."""
    old: dict[str, tuple[float, ...]]
    """The trainers' log-probs before the update: data of the loss."""
    now: dict[str, tuple[float, ...]]
    """The trainers' log-probs after it."""
    samples: list[TrainSample]
    trainer: GrpoTrainer
    """Closed; for its spec and its reference scores."""

    def gradient(self, **options: Any) -> Gradients:
        """The true gradient, in float64 at the rounded weights; samples are added in float64."""
        leaves = {n: t.detach().double().requires_grad_() for n, t in self.weights.items()}
        model = self.trainer.spec.model
        for part in plain_losses(
            lambda ids: plain_logits(leaves, ids, model),
            self.samples,
            self.trainer,
            old=self.old,
            **options,
        ):
            part.backward()
        true = taken(leaves)
        require_real(true)
        return true


def off_policy(
    case: Case, model: ModelSpec, tokens: int, folder: Path, scratch: Path, *, seed: int = 0
) -> OffPolicy:
    """Make one update with every trainer, and take its gradient of `case` after it."""
    moving = rewarded_samples(tokens, seed=seed)
    samples = [replace(s, advantage=s.advantage if case.advantages else 0.0) for s in moving]
    spec = make_spec("bfloat16", model=model, lr=case.lr, **case.loss)
    norms, states = {}, []
    for name in sorted(TRAINERS):
        named = spec.model_copy(update={"trainer": name})
        with started(named, folder, scratch) as trainer:
            trainer.score(moving)
            old = trainer.scores()
            trainer.update(moving, step=1, update=0)
            shards, figures = trainer._gradients(samples)
            trainer.score(moving)
            states.append((current_weights(trainer, torch.bfloat16), old, trainer.scores()))
        norms[name] = norm({n: shard.local.double() for n, shard in shards.items()})
        clipped = sum(figure.figures["pg_clipfrac"] for figure in figures)
        assert 0.05 < clipped < 0.95 if case.advantages else clipped == 0.0, clipped
    weights, old, now = states[0]
    for others in states[1:]:
        torch.testing.assert_close(others[0], weights, rtol=0, atol=0)
        assert others[1:] == (old, now)
    return OffPolicy(
        norms=norms, weights=weights, old=old, now=now, samples=samples, trainer=trainer
    )


def require_norms_within(norms: dict[str, float], true: float) -> None:
    """The bfloat16 bounds; the errors are logged (`pytest --log-cli-level=INFO`)."""
    found = {name: value / true - 1 for name, value in norms.items()}
    logger.info("norms: %s", {name: f"{error:+.3%}" for name, error in found.items()})
    worst = max(map(abs, found.values()))
    assert worst < NORM_BFLOAT16, f"norm: {found} is not within {NORM_BFLOAT16}"
    mutual = max(norms.values()) / min(norms.values()) - 1
    assert mutual < MUTUAL_BFLOAT16, f"mutual: {mutual} is not below {MUTUAL_BFLOAT16}"


def test_a_trainer_that_does_not_clip_is_outside_of_the_bfloat16_bounds(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = trainer_module.token_terms

    def unclipped(*args: Any, loss: LossSpec, **kwargs: Any) -> TokenTerms:
        """The honest figures, so that the share that ought to be clipped is seen."""
        wide = loss.model_copy(update={"clip_low": 1.0, "clip_high": 1e6})
        terms = honest(*args, loss=wide, **kwargs)
        return replace(terms, pg_clipfrac=honest(*args, loss=loss, **kwargs).pg_clipfrac)

    monkeypatch.setattr(trainer_module, "token_terms", unclipped)
    case = OFF_POLICY_CASES[1]
    found = off_policy(case, QWEN2, DECIDED_TOKENS, folders["qwen2"], tmp_path)
    for true in (found.gradient(), found.gradient(deciding=found.now)):
        with pytest.raises(AssertionError, match="norm: "):
            require_norms_within(found.norms, norm(true))


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_reference_scores_are_float64s_of_initial_weights(
    trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Scored while actor and reference differ: else a swap that does nothing would do."""
    spec = make_spec("float32").model_copy(update={"trainer": trainer})
    samples = made_samples()
    with started(spec, folders["qwen2"], tmp_path) as running:
        initial = current_weights(running, torch.float64)
        for step in (1, 2):
            running.score(samples)
            running.update(samples, step=step, update=0)
        running.score(samples)
        references, actor = running.reference_scores(), running.scores()
    true = {s.request_id: plain_scores(initial, s, spec) for s in samples}
    assert largest_difference(references, true) < SCORE_FLOAT32
    assert largest_difference(references, actor) > 1e3 * SCORE_FLOAT32


def plain_scores(
    weights: dict[str, torch.Tensor], sample: TrainSample, spec: RunSpec
) -> tuple[float, ...]:
    ids = torch.tensor([*sample.prompt_token_ids, *sample.token_ids])
    with torch.no_grad():
        logits = plain_logits(weights, ids, spec.model)[len(sample.prompt_token_ids) - 1 : -1]
    logs = torch.log_softmax(logits / spec.sampling.temperature, -1)
    return tuple(logs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0].tolist())


def largest_difference(
    scores: dict[str, tuple[float, ...]], others: dict[str, tuple[float, ...]]
) -> float:
    assert scores.keys() == others.keys()
    return max(
        abs(x - y) for name in scores for x, y in zip(scores[name], others[name], strict=True)
    )


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_true_gradient_of_zero_is_vacuous_not_within(
    trainer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The control: with no term in the loss both gradients are zero, and nothing is shown."""
    nothing = Case(name="nothing", loss={"reference": True})
    ours, true, stock, _ = measured(nothing, "float32", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert norm(ours) == norm(true) == 0.0
    with pytest.raises(AssertionError, match="vacuous"):
        require_within(ours, true, stock)


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_layer_that_loses_its_residual_is_outside_of_the_bounds(
    trainer: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = numerics.add, count()

    def add(residual: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Four additions a forward: the third is the second layer's after its attention."""
        return output if next(calls) % 4 == 2 else honest(residual, output)

    monkeypatch.setattr(numerics, "add", add)
    ours, true, stock, _ = measured(CASES[0], "float32", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert abs(norm(ours) / norm(true) - 1) > 100 * NORM_FLOAT32
    assert max(errors(ours, true).values()) > 100 * PARAMETER_FLOAT32
    with pytest.raises(AssertionError, match="norm: "):
        require_within(ours, true, stock)


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_a_norm_with_another_epsilon_is_outside_of_the_bounds(
    trainer: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = numerics.rms_norm
    monkeypatch.setattr(numerics, "rms_norm", lambda x, w, eps: honest(x, w, 2 * eps))
    ours, true, stock, _ = measured(CASES[0], "float32", QWEN2, trainer, folders["qwen2"], tmp_path)
    assert max(errors(ours, true).values()) > PARAMETER_FLOAT32
    with pytest.raises(AssertionError, match="is not below"):
        require_within(ours, true, stock)
