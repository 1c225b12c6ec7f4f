"""AdamW on the rows a rank owns, with its state in plain tensors.

Invariant: an element's new value depends on that element alone, so sharding cannot be seen. The
state is two float32 tensors a parameter and one count of steps: nothing is made lazily, so a
checkpoint always has all of it.

    optimizer = ShardedAdamW(shards, spec.optimizer)
    optimizer.step(shards, gradients, learning_rate=1e-6, weight_decay=0.1)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engines import numerics
from engines.train.shards import Shard
from model_specs.run_spec import OptimizerSpec


class ShardedAdamW:
    """`numerics.adamw_steps_` over all parameters of a model."""

    def __init__(self, shards: Mapping[str, Shard], spec: OptimizerSpec) -> None:
        self._spec = spec
        self.num_steps = 0
        self.exp_avg = {name: torch.zeros_like(shard.local) for name, shard in shards.items()}
        self.exp_avg_sq = {name: torch.zeros_like(shard.local) for name, shard in shards.items()}

    def reset(self) -> None:
        """Go back to the state before the first step, in place."""
        self.num_steps = 0
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.zero_()

    def step(
        self,
        shards: Mapping[str, Shard],
        gradients: Mapping[str, torch.Tensor],
        *,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Update the live masters in place.

        Weight decay applies to parameters of two dimensions and more, as in Megatron: norms and
        biases are not decayed.

        Args:
            shards: Name -> live float32 rows.
            gradients: Name -> float32 rows of the same shape.
            learning_rate: Of this step.
            weight_decay: Of this step.
        """
        self.num_steps += 1
        for decay, names in (
            (weight_decay, [name for name, shard in shards.items() if len(shard.shape) > 1]),
            (0.0, [name for name, shard in shards.items() if len(shard.shape) <= 1]),
        ):
            numerics.adamw_steps_(
                [shards[name].local for name in names],
                [gradients[name] for name in names],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                step=self.num_steps,
                lr=learning_rate,
                beta1=self._spec.beta1,
                beta2=self._spec.beta2,
                eps=self._spec.eps,
                weight_decay=decay,
            )

    def named_moments(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return `exp_avg.<name>` and `exp_avg_sq.<name>` -> the live moments."""
        moments = {}
        for kind, values in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
            for name, shard in shards.items():
                moments[f"{kind}.{name}"] = shard.like(values[name])
        return moments
