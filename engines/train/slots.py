"""Which samples form a slot, and how a slot is laid out in rows.

A slot is the unit of backward. Invariant: slots are a pure function of the samples' order and of
the spec, never of ranks; inside a slot each sequence begins at a multiple of 64 rows and is padded
with zero rows to the next one, so that the fixed 64-row blocks of the weight gradient are aligned
to sequences whatever is packed together.

    for indices in plan_slots(len(samples), num_slots=spec.reduction.slots):
        slot = pack_slot([samples[index] for index in indices])
        logprobs, entropy = model(slot)          # [slot.num_tokens] each
        per_sample = slot.split(logprobs)

A slot with more rows than a rank may run at once is packed as several micro-batches, in order
(`plan_slot_parts`); `engines.numerics.SlotSums` keeps its gradient one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from engines.contracts import TrainSample
from engines.numerics import ROW_BLOCK, Forbidden
from model_specs.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSlot:
    """The samples of one slot in one row dimension of M rows, and the T tokens to be scored.

    A sequence of P prompt and C completion tokens takes P + C - 1 rows: nothing follows the last
    token. Its completion token i is scored from the logits at its row P - 1 + i. The hidden states
    of scored rows are collected into H head rows, aligned by sequence like the rows themselves.
    """

    request_ids: tuple[str, ...]
    ids: torch.Tensor
    """int64 [M]; 0 in padding."""
    positions: torch.Tensor
    """int64 [M]; 0 in padding."""
    padding: torch.Tensor
    """bool [M]."""
    starts: tuple[int, ...]
    """First row of each sequence, a multiple of 64."""
    lengths: tuple[int, ...]
    """Rows of each sequence."""
    scored_rows: torch.Tensor
    """int64 [T]: row of [0, M) from whose logits each completion token is scored."""
    head_rows: torch.Tensor
    """int64 [T]: row of [0, H) in which the head scores it."""
    num_head_rows: int
    """H, a multiple of 64."""
    targets: torch.Tensor
    """int64 [H]: token to be scored in each head row; 0 in padding."""
    counts: tuple[int, ...]
    """Completion tokens of each sequence; they sum to T."""
    forbidden: Forbidden | None = None
    """Tokens that could not be drawn, and the head rows [H] in which they could not."""

    @property
    def num_tokens(self) -> int:
        """T, the number of scored tokens."""
        return sum(self.counts)

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """Index in [0, T) of each sequence's first scored token."""
        return (0, *accumulate(self.counts))[:-1]

    def to(self, device: torch.device) -> PackedSlot:
        """Return the slot with its tensors on `device`; itself where they are."""
        if self.ids.device == device:
            return self
        names = ("ids", "positions", "padding", "scored_rows", "head_rows", "targets")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        if self.forbidden is not None:
            moved["forbidden"] = Forbidden(*(tensor.to(device) for tensor in self.forbidden))
        return replace(self, **moved)

    def split(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut [T] values into one tensor a sequence."""
        return values.split(self.counts)


def plan_slots(num_samples: int, *, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Assign sample indices to slots: contiguous, in order, the same number to each.

    Raises:
        EngineError: `num_slots` does not divide `num_samples`.
    """
    if num_samples == 0 or num_samples % num_slots:
        raise EngineError(
            f"{num_samples} samples cannot be dealt evenly to {num_slots} slots; an update must be "
            "given a multiple of reduction.slots samples"
        )
    size = num_samples // num_slots
    return tuple(tuple(range(k * size, (k + 1) * size)) for k in range(num_slots))


def num_rows(sample: TrainSample) -> int:
    """Return the rows that a sample takes in a slot: its tokens but the last, padded to 64."""
    length = len(sample.prompt_token_ids) + len(sample.token_ids) - 1
    return length + -length % ROW_BLOCK


def plan_micro_batches(
    rows: Sequence[int], *, max_rows: int | None, max_samples: int
) -> tuple[tuple[int, ...], ...]:
    """Pack samples, in order, into forwards that fit; a pure function of their lengths.

    What is packed together decides no bit of a score, so the bound may be any.

    Args:
        rows: Rows of each sample (`num_rows`).
        max_rows: Most rows of one forward; None has no bound.
        max_samples: Most samples of one forward.

    Returns:
        Indices of the samples of each forward; every index once.

    Raises:
        EngineError: One sample alone is above the bound.
    """
    plan: list[tuple[int, ...]] = []
    used = 0
    for index, count in enumerate(rows):
        if max_rows is not None and count > max_rows:
            raise EngineError(
                f"sample {index} takes {count} rows, but trainer_options.max_tokens_per_rank="
                f"{max_rows}; raise it, or shorten data.max_prompt_tokens or "
                "sampling.max_new_tokens"
            )
        fits = max_rows is None or used + count <= max_rows
        if plan and fits and len(plan[-1]) < max_samples:
            plan[-1] = (*plan[-1], index)
            used += count
        else:
            plan.append((index,))
            used = count
    return tuple(plan)


def plan_slot_parts(
    rows: Sequence[int], slots: Sequence[Sequence[int]], *, max_rows: int | None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Cut every slot of an update into micro-batches that fit; a pure function of lengths.

    All slots get the same number of micro-batches, so that ranks, whatever their number, make the
    same collective calls: a slot that needs fewer is cut further, from its first sample on.

    Args:
        rows: Rows of each sample of the update (`num_rows`).
        slots: Indices of the samples of each slot, as many in each (`plan_slots`).
        max_rows: Most rows of one micro-batch; None has no bound.

    Returns:
        For each slot its micro-batches: indices of samples, in the order of the slot.

    Raises:
        EngineError: One sample alone is above the bound.
    """
    plans: list[list[tuple[int, ...]]] = []
    for indices in slots:
        places = plan_micro_batches(
            [rows[index] for index in indices], max_rows=max_rows, max_samples=len(indices)
        )
        plans.append([tuple(indices[place] for place in part) for part in places])
    count = max(len(parts) for parts in plans)
    for parts in plans:
        while len(parts) < count:
            first = next(number for number, part in enumerate(parts) if len(part) > 1)
            parts[first : first + 1] = [parts[first][:1], parts[first][1:]]
    return tuple(tuple(parts) for parts in plans)


def pack_slot(samples: Sequence[TrainSample]) -> PackedSlot:
    """Lay samples out in rows, in the order given.

    Raises:
        EngineError: There is no sample, one has an empty prompt or completion, or a token where it
            was forbidden.
    """
    if not samples:
        raise EngineError("a slot needs at least one sample, got none")
    ids: list[int] = []
    positions: list[int] = []
    padding: list[bool] = []
    starts: list[int] = []
    lengths: list[int] = []
    scored_rows: list[int] = []
    head_rows: list[int] = []
    targets: list[int] = []
    for sample in samples:
        prompt, completion = sample.prompt_token_ids, sample.token_ids
        if not prompt or not completion:
            raise EngineError(
                f"{sample.request_id}: a sample needs a prompt and a completion, got {len(prompt)} "
                f"and {len(completion)} tokens"
            )
        start, length = len(ids), len(prompt) + len(completion) - 1
        starts.append(start)
        lengths.append(length)
        pad = -length % ROW_BLOCK
        ids += [*prompt, *completion[:-1], *[0] * pad]
        positions += [*range(length), *[0] * pad]
        padding += [False] * length + [True] * pad
        scored_rows += range(start + len(prompt) - 1, start + length)
        head_rows += range(len(targets), len(targets) + len(completion))
        targets += [*completion, *[0] * (-len(completion) % ROW_BLOCK)]
    return PackedSlot(
        request_ids=tuple(sample.request_id for sample in samples),
        ids=torch.tensor(ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        padding=torch.tensor(padding, dtype=torch.bool),
        starts=tuple(starts),
        lengths=tuple(lengths),
        scored_rows=torch.tensor(scored_rows, dtype=torch.int64),
        head_rows=torch.tensor(head_rows, dtype=torch.int64),
        num_head_rows=len(targets),
        targets=torch.tensor(targets, dtype=torch.int64),
        counts=tuple(len(sample.token_ids) for sample in samples),
        forbidden=_forbidden(samples),
    )


def _forbidden(samples: Sequence[TrainSample]) -> Forbidden | None:
    """Return what was forbidden in which head rows; None where nothing was."""
    ids = {sample.forbidden_ids for sample in samples if sample.forbidden_ids}
    if not ids:
        return None
    if len(ids) > 1:
        raise EngineError(
            f"samples of one slot were drawn under different forbidden ids: {sorted(ids)}; they "
            "must come of one model and one spec"
        )
    rows: list[bool] = []
    for sample in samples:
        count = len(sample.token_ids)
        until = min(sample.forbidden_until, count) if sample.forbidden_ids else 0
        for position, token in enumerate(sample.token_ids[:until]):
            if token in sample.forbidden_ids:
                raise EngineError(
                    f"{sample.request_id}: token {token} at position {position} ends a completion, "
                    f"which was forbidden before position {sample.forbidden_until}: it has no "
                    "log-prob; the rollout does not keep sampling.min_new_tokens"
                )
        rows += [True] * until + [False] * (count - until + -count % ROW_BLOCK)
    return Forbidden(torch.tensor(*ids, dtype=torch.int64), torch.tensor(rows, dtype=torch.bool))
