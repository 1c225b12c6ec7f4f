"""Faults in a trainer rank's process, each on the live trainer; entered by `engines.drill.live`.

What each does and what catches it is in `engines.drill.catalogue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

import engines.train.fsdp2.model as model_module
import engines.train.trainer as trainer_module
from engines.drill.live import replaced
from engines.train.fsdp2.actor import Fsdp2Trainer
from engines.train.reduction import BinaryCounter
from engines.weights.names import EMBEDDING

Breaker = Iterator[None]

GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


# -- scoring


@contextmanager
def temperature_ignored_in_the_re_score(trainer: Fsdp2Trainer) -> Breaker:
    honest = model_module.scored_logprobs

    def at_one(*args: Any, temperature: float) -> Any:
        return honest(*args, temperature=1.0)

    with replaced(model_module, "scored_logprobs", at_one):
        yield


@contextmanager
def forward_differs_with_gradients(trainer: Fsdp2Trainer) -> Breaker:
    honest = model_module.scored_logprobs

    def off_by_an_ulp(*args: Any, **options: Any) -> Any:
        logprobs, entropy = honest(*args, **options)
        return logprobs * (1 + 2**-23) if torch.is_grad_enabled() else logprobs, entropy

    with replaced(model_module, "scored_logprobs", off_by_an_ulp):
        yield


@contextmanager
def old_reference_model(trainer: Fsdp2Trainer) -> Breaker:
    """The reference is read from the checkpoint that was resumed, not from the run's weights."""
    assert trainer._reference is not None
    resumed = {
        name: shard.local.to(trainer._compute_dtype, copy=True)
        for name, shard in trainer._shards.items()
    }
    with replaced(trainer._reference, "_rows", resumed):
        yield


# -- gradients


@contextmanager
def gradient_scale(trainer: Fsdp2Trainer) -> Breaker:
    honest = trainer_module.slot_loss
    with replaced(trainer_module, "slot_loss", lambda terms, weights: honest(terms, 2 * weights)):
        yield


@contextmanager
def _slots(trainer: Fsdp2Trainer, times: Callable[[int], int]) -> Breaker:
    """Add the gradient of slot k of an update `times(k)` times."""
    counter, slots = trainer._counter, count()
    honest, per_update = counter.push, trainer.spec.reduction.slots

    def push(tensors: Sequence[torch.Tensor]) -> None:
        for _ in range(times(next(slots) % per_update)):
            honest(tensors)

    with replaced(counter, "push", push):
        try:
            yield
        finally:
            counter._partial = []  # of an update that was refused


@contextmanager
def slot_dropped(trainer: Fsdp2Trainer) -> Breaker:
    with _slots(trainer, lambda slot: int(slot != 3)):
        yield


@contextmanager
def slot_doubled(trainer: Fsdp2Trainer) -> Breaker:
    with _slots(trainer, lambda slot: 1 + (slot == 3)):
        yield


@contextmanager
def slot_taken_for_another(trainer: Fsdp2Trainer) -> Breaker:
    with _slots(trainer, lambda slot: (2, 0, 1, 1)[slot]):
        yield


@contextmanager
def reduction_order(trainer: Fsdp2Trainer) -> Breaker:
    """Slots are added from left to right instead of as a balanced tree."""

    def push(self: BinaryCounter, tensors: Sequence[torch.Tensor]) -> None:
        left = self._partial[0][1] if self._partial else [torch.zeros_like(t) for t in tensors]
        self._partial = [(0, [a + b for a, b in zip(left, tensors, strict=True)])]

    with replaced(BinaryCounter, "push", push):
        yield


@contextmanager
def gradient_not_finite(trainer: Fsdp2Trainer) -> Breaker:
    honest = trainer._take_update_gradient

    def with_nan() -> dict[str, torch.Tensor]:
        gradients = honest()
        gradients[DOWN].view(-1)[5] = math.nan
        return gradients

    with replaced(trainer, "_take_update_gradient", with_nan):
        yield


@contextmanager
def generator_touched(trainer: Fsdp2Trainer) -> Breaker:
    honest = trainer_module.slot_loss

    def drawing(*args: Any) -> torch.Tensor:
        torch.rand(1)
        return honest(*args)

    with replaced(trainer_module, "slot_loss", drawing):
        yield


# -- optimizer


@contextmanager
def _before_update(trainer: Fsdp2Trainer, change: Callable[[], None]) -> Breaker:
    honest = trainer.update

    def update(*args: Any, **options: Any) -> Any:
        change()
        return honest(*args, **options)

    with replaced(trainer, "update", update):
        yield


@contextmanager
def schedule_resumed_twice(trainer: Fsdp2Trainer) -> Breaker:
    state = trainer._state

    def counted_again() -> None:
        state.samples_consumed += trainer.spec.samples_per_update

    with _before_update(trainer, counted_again):
        yield


@contextmanager
def optimizer_step_shared(trainer: Fsdp2Trainer) -> Breaker:
    optimizer = trainer._optimizer

    def counted_again() -> None:
        optimizer.num_steps += 1

    with _before_update(trainer, counted_again):
        yield


@contextmanager
def moments_of_another_parameter(trainer: Fsdp2Trainer) -> Breaker:
    moments = trainer._optimizer.exp_avg

    def exchanged() -> None:
        kept = moments[GATE].clone()
        moments[GATE].copy_(moments[UP])
        moments[UP].copy_(kept)

    with _before_update(trainer, exchanged):
        yield


@contextmanager
def dtype_of_one_parameter(trainer: Fsdp2Trainer) -> Breaker:
    """One master is held in bfloat16."""
    honest = trainer._optimizer.step

    def step(shards: Any, *args: Any, **options: Any) -> None:
        honest(shards, *args, **options)
        shards[UP].local.copy_(shards[UP].local.bfloat16())

    with replaced(trainer._optimizer, "step", step):
        yield


# -- sending, and the process


@contextmanager
def _sending(
    trainer: Fsdp2Trainer, change: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]]
) -> Breaker:
    honest = trainer.wire_tensors

    def changed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in honest():
            yield from change(name, tensor)

    with replaced(trainer, "wire_tensors", changed):
        yield


@contextmanager
def one_tensor_not_pushed(trainer: Fsdp2Trainer) -> Breaker:
    with _sending(trainer, lambda name, tensor: [] if name == DOWN else [(name, tensor)]):
        yield


@contextmanager
def one_tensor_in_another_dtype(trainer: Fsdp2Trainer) -> Breaker:
    with _sending(trainer, lambda n, t: [(n, t.float() if n == DOWN else t)]):
        yield


@contextmanager
def sent_before_the_update_was_applied(trainer: Fsdp2Trainer) -> Breaker:
    """What is sent is the embedding as it was when the fault began."""
    old = trainer._shards[EMBEDDING].local.to(trainer._compute_dtype, copy=True)
    with _sending(trainer, lambda n, t: [(n, old.clone() if n == EMBEDDING else t)]):
        yield


@contextmanager
def switch_flipped(trainer: Fsdp2Trainer) -> Breaker:
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)
