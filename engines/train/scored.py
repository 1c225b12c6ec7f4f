"""What an update reads of the samples that were scored before it, and the checks on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from engines.contracts import TrainSample
from model_specs.errors import EngineError
from model_specs.run_spec import LossSpec


def scored_rows(scores: Mapping[str, torch.Tensor], samples: Sequence[TrainSample]) -> torch.Tensor:
    """Return the stored log-probs of these samples, float32 `[tokens of all samples]`.

    Raises:
        EngineError: A sample was not scored, or with another number of tokens.
    """
    rows = []
    for sample in samples:
        row = scores.get(sample.request_id)
        if row is None or len(row) != len(sample.token_ids):
            found = "none" if row is None else f"{len(row)} log-probs"
            raise EngineError(
                f"{sample.request_id}: {len(sample.token_ids)} tokens are to be trained on, "
                f"but the last score() has {found}; score the samples of a step before its "
                "updates"
            )
        rows.append(row)
    return torch.cat(rows)


def behaviour_logprobs(samples: Sequence[TrainSample], loss: LossSpec) -> torch.Tensor | None:
    """Return the rollout's log-probs where the loss corrects by them, else None.

    Raises:
        EngineError: A sample does not have one for each of its tokens.
    """
    if loss.tis_clip is None:
        return None
    for sample in samples:
        if len(sample.rollout_logprobs) != len(sample.token_ids):
            raise EngineError(
                f"{sample.request_id}: {len(sample.token_ids)} tokens and "
                f"{len(sample.rollout_logprobs)} rollout log-probs; loss.tis_clip needs one for "
                "each token"
            )
    return torch.tensor([value for sample in samples for value in sample.rollout_logprobs])


def require_no_gradient(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Require that a part of a slot that is not its last has left no gradient behind.

    Args:
        parameters: Name and tensor of everything that a backward leaves gradients on.

    Raises:
        EngineError: A parameter has one: its op has rounded too early.
    """
    for name, parameter in parameters:
        if parameter.grad is not None:
            raise EngineError(
                f"{name} was given a gradient before the last micro-batch of its slot: its op does "
                "not keep its sums in engines.numerics.slot_sums, so its gradient would be rounded "
                "more than once; unset trainer_options.max_tokens_per_rank"
            )
