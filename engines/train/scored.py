"""What an update reads of the samples that were scored before it, and the checks on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engines.contracts import TrainSample
from engines.train.slots import PackedSlot
from model_specs.errors import EngineError
from model_specs.run_spec import LossSpec, RunSpec


def require_fits(slot: PackedSlot, spec: RunSpec) -> None:
    """Refuse a slot of more rows than `trainer_options.max_tokens_per_rank`.

    Raises:
        EngineError: With both numbers.
    """
    bound = spec.trainer_options.max_tokens_per_rank
    if bound is not None and len(slot.ids) > bound:
        raise EngineError(
            f"a slot of {len(slot.lengths)} samples takes {len(slot.ids)} rows, but "
            f"trainer_options.max_tokens_per_rank={bound}; raise it, or reduction.slots="
            f"{spec.reduction.slots} so that a slot has fewer samples"
        )


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
