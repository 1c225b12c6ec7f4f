"""How gradients are summed over slots, measured and clipped, whatever the number of ranks.

The gradient of an update is an expression: the balanced binary tree over its slots, in float32.
Rank r takes slots r, r + n, r + 2n, ...; `TreeReduceScatter` adds the n slots of a round in rank
order as a subtree, `BinaryCounter` adds the rounds as the tree above it. Invariant: for any power
of two n that divides the number of slots the additions are the same ones, so the bits are.

    counter = BinaryCounter()
    for slot in rounds:
        ...backward...
        counter.push([shard.grad for shard in shards])
    gradients = counter.result()
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from engines import numerics

NORM_EPS = 1e-6
"""Added to the norm before dividing, as in `torch.nn.utils.clip_grad_norm_`."""


class TreeReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter as an exchange of raw chunks and a balanced tree in rank order."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised communication buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write the sum over ranks of this rank's chunk.

        Args:
            output_tensor: [n], this rank's chunk of the sum.
            input_tensor: [world size * n], one chunk a rank.
            group: The ranks, in order.
            op: Must be a sum; FSDP2 is told so by `set_force_sum_reduction_for_comms`.
            async_op: Ignored: the call returns when the sum is written.

        Raises:
            ValueError: `op` is something else than a sum.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"the tree reduction adds; FSDP2 asked for {op}")
        if group.size() == 1:
            output_tensor.copy_(input_tensor)
            return
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor.contiguous(), group=group)
        chunks = received.view(group.size(), -1).unbind(0)
        output_tensor.copy_(numerics.tree_sum(list(chunks)))


class BinaryCounter:
    """Adds a stream of lists of tensors as a balanced binary tree.

    Holds one partial sum for each one-bit of the number of lists pushed, so log2(n) + 1 copies.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, list[torch.Tensor]]] = []

    def push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the next list of tensors; they are kept, not copied."""
        level, current = 0, list(tensors)
        while self._partial and self._partial[-1][0] == level:
            _, left = self._partial.pop()
            current = list(torch._foreach_add(left, current))  # on a GPU one launch for many
            level += 1
        self._partial.append((level, current))

    def result(self) -> list[torch.Tensor]:
        """Return the sum and start afresh.

        Raises:
            ValueError: The number of lists was not a power of two, so that the tree is not
                complete.
        """
        if len(self._partial) != 1:
            raise ValueError(
                f"{sum(2**level for level, _ in self._partial)} slots were pushed; a complete "
                "tree needs a power of two"
            )
        ((_, total),) = self._partial
        self._partial = []
        return total


def total_norm(row_squares: Sequence[torch.Tensor]) -> float:
    """Return the float64 Euclidean norm over all parameters.

    Args:
        row_squares: Per parameter, in one fixed order, the float64 [rows] sums of squares of all
            its rows in row order (`numerics.row_square_sums`), gathered from the ranks.
    """
    return math.sqrt(float(numerics.ordered_sum(torch.cat(list(row_squares)))))


def clip_coefficient(norm: float, *, clip_grad: float) -> float:
    """Return the factor in (0, 1] that brings a norm down to `clip_grad`."""
    return min(1.0, clip_grad / (norm + NORM_EPS))
