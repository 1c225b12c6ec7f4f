"""An update that fails in its second slot leaves nothing behind that a later one would add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import engines.train.trainer as trainer_module
from engines import numerics
from engines.contracts import TrainSample
from engines.train.registry import TRAINERS
from engines.train.trainer import GrpoTrainer
from model_specs.errors import EngineError
from model_specs.run_spec import StockReduction, TreeReduction
from tests.engines.trainer_cases import QWEN2, made_samples, make_spec, started, write_model

SLOTS = 2
CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
REDUCTIONS = (TreeReduction(slots=SLOTS), StockReduction(slots=SLOTS, world_size=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2"), QWEN2)


class Planned(Exception):
    """Raised by what a test has put in."""


def raise_planned(*_: Any) -> None:
    raise Planned


def on_call(number: int, honest: Callable[..., Any]) -> Callable[..., Any]:
    """The honest function, but for one call of it."""
    calls = count(1)
    return lambda *args, **kwargs: (
        raise_planned() if next(calls) == number else honest(*args, **kwargs)
    )


@contextmanager
def an_unscored_sample(trainer: GrpoTrainer, samples: list[TrainSample]) -> Iterator[None]:
    """The second slot stops before its forward."""
    del trainer._scores[samples[-1].request_id]
    with pytest.raises(EngineError, match=f"{samples[-1].request_id}: .* has none"):
        yield


@contextmanager
def in_the_forward(trainer: GrpoTrainer, samples: list[TrainSample]) -> Iterator[None]:
    """Four additions a forward: in the second slot's second layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "add", on_call(4 + 3, numerics.add))
        with pytest.raises(Planned):
            yield


@contextmanager
def in_the_loss(trainer: GrpoTrainer, samples: list[TrainSample]) -> Iterator[None]:
    """Between the second slot's forward and its backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "token_terms", on_call(2, trainer_module.token_terms))
        with pytest.raises(Planned):
            yield


@contextmanager
def in_the_backward(trainer: GrpoTrainer, samples: list[TrainSample]) -> Iterator[None]:
    """When the second slot's gradient has passed the second layer and comes to the first."""
    calls = count(1)

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if next(calls) == 2:
            hidden.register_hook(raise_planned)

    handle = trainer._decoder_layers()[0].register_forward_hook(hook)
    with pytest.raises(Planned):
        yield
    handle.remove()


FAILURES: tuple[Callable[..., AbstractContextManager[None]], ...] = (
    an_unscored_sample,
    in_the_forward,
    in_the_loss,
    in_the_backward,
)


STUCK = (in_the_forward, in_the_backward)
"""After these FSDP2 has to be reset; that of torch 2.11 cannot be, and is refused instead."""
ROWS = [
    pytest.param(trainer, failure, id=f"{trainer}-{failure.__name__}")
    for trainer in sorted(TRAINERS)
    for failure in FAILURES
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: reduction.kind)
@pytest.mark.parametrize(("trainer", "failure"), ROWS)
def test_a_retry_after_a_failed_slot_gives_the_bits_of_an_update_that_never_failed(
    trainer: str, reduction: Any, failure: Any, folder: Path, tmp_path: Path
) -> None:
    """After one update, so that the reference, which a stale copy would replace, is another."""
    spec = make_spec("bfloat16", kl_coef=0.1).model_copy(
        update={"trainer": trainer, "reduction": reduction}
    )
    is_refused = trainer == "fsdp2" and failure in STUCK and not CAN_RESET
    logs = []
    for fails in (False, True):
        with started(spec, folder, tmp_path) as running:
            running.score(made_samples())
            running.update(made_samples(), step=1, update=0)
            samples = made_samples(seed=1)
            before = running.score(samples)
            if fails:
                state = running.state_digest()
                with failure(running, samples):
                    running.update(samples, step=2, update=0)
                assert running.state_digest() == state
                if is_refused:
                    with pytest.raises(EngineError, match="start the trainer again"):
                        running.score(samples)
                    return
                assert running.score(samples) == before
            references = running.reference_scores()
            assert references != running.scores()
            record = running.update(samples, step=2, update=0)
            logs.append([before, references, record, running.state_digest()])
    assert logs[0] == logs[1]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_an_fsdp2_that_cannot_be_reset_is_refused_only_where_it_is_stuck(
    failure: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 has it, which no call takes out of a forward or backward that failed."""
    monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    with started(make_spec("bfloat16"), folder, tmp_path) as running:
        samples = made_samples()
        before = running.score(samples)
        with failure(running, samples):
            running.update(samples, step=1, update=0)
        if failure in STUCK:
            with pytest.raises(EngineError, match="start the trainer again"):
                running.score(samples)
        else:
            assert running.score(samples) == before
            assert running.update(samples, step=1, update=0).changed_weights == 26
