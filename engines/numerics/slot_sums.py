"""Parameter gradients of a slot that is run in several micro-batches: one sum, one rounding.

A slot's gradient is one left-to-right float32 sum that is rounded once. Rounding in every
micro-batch and adding what was rounded would give other bits. So while a slot is run in parts, each
op with parameters leaves its float32 sums here, goes on from them in the next part, and returns a
gradient in the last part alone; before, it returns none. Which sums are whose is told by the order
of calls in a forward, which is the same in every part.

    sums = SlotSums()
    for index, part in enumerate(parts):
        with sums.part(last=index == len(parts) - 1):
            loss_of(part).backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OpSums:
    """The float32 sums of one call of an op, for as many parameters as it has."""

    def __init__(self, totals: dict[int, torch.Tensor], *, is_last: bool) -> None:
        self._totals = totals
        self._is_last = is_last

    def total(self, index: int) -> torch.Tensor | None:
        """Return what earlier parts of the slot have summed for parameter `index`, to go on from.

        None in the first part: start from zero.
        """
        return self._totals.pop(index, None)

    def dtype_of_sum(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an op may leave its sum: `dtype` in the last part alone."""
        return dtype if self._is_last else torch.float32

    def rounded(self, index: int, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return `total` in `dtype` in the last part of a slot; keep it and return None before."""
        if self._is_last:
            return total.to(dtype)
        self._totals[index] = total
        return None


class SlotSums:
    """The sums of all ops of one slot."""

    def __init__(self) -> None:
        self._ops: list[dict[int, torch.Tensor]] = []
        self._calls = 0
        self._is_last = False

    @contextmanager
    def part(self, *, last: bool) -> Iterator[None]:
        """Run forward and backward of one micro-batch inside of this."""
        global _active
        self._calls, self._is_last, _active = 0, last, self
        try:
            yield
        finally:
            _active = None

    def next_op(self) -> OpSums:
        """Return the sums of the op that is called next in this part's forward."""
        if self._calls == len(self._ops):
            self._ops.append({})
        self._calls += 1
        return OpSums(self._ops[self._calls - 1], is_last=self._is_last)


_active: SlotSums | None = None
"""Of the slot that is being run in parts. Read in forwards only: a backward has other threads."""


def next_op_sums() -> OpSums:
    """Return the sums for the op that is being called; an op calls it once in its forward.

    Where no slot is run in parts, nothing was summed before and what is summed is rounded at once.
    """
    return OpSums({}, is_last=True) if _active is None else _active.next_op()
