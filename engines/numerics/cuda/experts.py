"""A mixture of experts in a few launches, whatever the number of experts.

Rows are sorted by expert on the device and the host is told nothing, so that a CUDA graph can
capture the forward.

Forward: all experts' rows go through one kernel with one tile shape. A row's results are weighted
and added in float32 in the order of its slots, and rounded once.

Backward: the projections are made again. The input gradient is added over slots in the same order.
The weight gradient of an expert is summed over the blocks of 64 source rows, left to right; within
a block over the rows that chose it, in chunks of 16. A block belongs to one sequence, so packing
cannot be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK
from engines.numerics.cuda.expert_kernels import (
    combine_kernel,
    expert_matmul_kernel,
    expert_weight_gradient_kernel,
    spread_kernel,
)
from engines.numerics.cuda.layout import aligned, power_of_two, row_major
from engines.numerics.cuda.pointwise import silu_mul, silu_mul_gradient
from engines.numerics.slot_sums import next_op_sums

CHUNK = 16
"""Rows of one step of the weight gradient."""
_COLUMNS = 1024


def expert_mlp(
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: Sequence[torch.Tensor],
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each row's experts; see `engines.numerics.expert_mlp`.

    Args:
        hidden: `[M, K]`, float32 or bfloat16; sequences start at multiples of 64 rows.
        experts: int64 `[M, S]`, distinct within a row, of `route`.
        weights: float32 `[M, S]`.
        gate: for each expert `[inner, K]`, dtype of `hidden`.
        up: for each expert `[inner, K]`.
        down: for each expert `[K, inner]`.
    """
    if not len(gate) == len(up) == len(down):
        raise ValueError(
            f"expert_mlp: {len(gate)} gate, {len(up)} up and {len(down)} down matrices; each "
            "expert has one of each"
        )
    return _Experts.apply(hidden, experts, weights, len(down), *gate, *up, *down)  # type: ignore[no-any-return]


@torch.no_grad()
def mix_experts(
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Return `expert_mlp` of matrices that lie in stacks, without a copy of them; no gradient.

    Args:
        hidden: `[M, K]`.
        experts: integer `[M, S]`.
        weights: float32 `[M, S]`.
        gate: `[E, inner, K]`, any strides but of the last dimension, as are the other two.
        up: `[E, inner, K]`.
        down: `[E, K, inner]`.
    """
    places = _Places.of(experts, num_experts=down.shape[0])
    return _combine(_forward(row_major(hidden), places, gate, up, down)[2], weights)


@dataclass(frozen=True, slots=True)
class _Places:
    """Rows sorted by expert; all on the device."""

    first: torch.Tensor
    """int32 `[E + 1]`: first place of each expert, and the end."""
    rows: torch.Tensor
    """int64 `[M * S]`: row of each place."""
    cells: torch.Tensor
    """int64 `[M * S]`: row * S + slot of each place."""
    experts: torch.Tensor
    """int64 `[M * S]`: expert of each place, ascending."""

    @classmethod
    def of(cls, experts: torch.Tensor, *, num_experts: int) -> _Places:
        by_expert, cells = experts.long().flatten().sort(stable=True)
        bounds = torch.arange(num_experts + 1, device=experts.device)
        first = torch.searchsorted(by_expert, bounds, out_int32=True)
        return cls(first, cells // experts.shape[1], cells, by_expert)

    def chunks(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut the places of each expert and block of 64 rows into chunks of 16.

        Returns:
            int32 place of each row of each chunk, -1 where it is empty, and int64 `[E + 1]` first
            chunk of each expert, and the end.
        """
        blocks, num_experts = max(1, -(-num_rows // ROW_BLOCK)), len(self.first) - 1
        key = self.experts * blocks + self.rows // ROW_BLOCK
        bounds = torch.arange(num_experts * blocks + 1, device=key.device)
        starts = torch.searchsorted(key, bounds)
        counts = starts.diff()
        ends = ((counts + CHUNK - 1) // CHUNK).cumsum(0)
        first_chunk = torch.cat((ends.new_zeros(1), ends))
        # Each non-empty pair of expert and block wastes less than a chunk.
        most = len(key) // CHUNK + min(len(counts), len(key))
        places = torch.full((most * CHUNK,), -1, dtype=torch.int32, device=key.device)
        index = torch.arange(len(key), device=key.device)
        padded = first_chunk[key] * CHUNK + index - starts[key]
        places.scatter_(0, padded, index.to(torch.int32))
        return places, first_chunk[::blocks].contiguous()


def _project(
    x: torch.Tensor, matrices: torch.Tensor, places: _Places, *, transposed: bool,
    source: torch.Tensor | None = None, target: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return each place's row times its expert's matrix, transposed or not."""
    matrices = row_major(matrices)
    count, k = len(places.rows), x.shape[1]
    n = matrices.shape[1] if transposed else matrices.shape[2]
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    whole = x.dtype == torch.float32
    rows, columns, inner = (64, 64, 32) if whole else (64, 128, 64)
    strides = (matrices.stride(1), 1) if not transposed else (1, matrices.stride(1))
    tiles = count // rows + matrices.shape[0]
    expert_matmul_kernel[(tiles, triton.cdiv(n, columns))](
        x, matrices, out, places.first, source, target, matrices.shape[0], n, k, x.stride(0),
        matrices.stride(0), *strides, n,
        GATHER=source is not None, SCATTER=target is not None, BLOCK_M=rows, BLOCK_N=columns,
        BLOCK_K=inner, PRECISION="ieee", num_warps=4, num_stages=2 if whole else 3,
    )  # fmt: skip
    return out


def _forward(
    hidden: torch.Tensor,
    places: _Places,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gate and up projections in order of places, and outputs `[M * S, K]` of the cells."""
    gates = _project(hidden, gate, places, transposed=True, source=places.rows)
    ups = _project(hidden, up, places, transposed=True, source=places.rows)
    outputs = _project(silu_mul(gates, ups), down, places, transposed=True, target=places.cells)
    return gates, ups, outputs


def _combine(parts: torch.Tensor, weights: torch.Tensor, *, weighted: bool = True) -> torch.Tensor:
    """Add `[M * S, K]` over the slots of each row, in order; `[M, K]`."""
    rows, slots = weights.shape
    out = torch.empty(rows, parts.shape[1], dtype=parts.dtype, device=parts.device)
    if out.numel():
        combine_kernel[(rows, triton.cdiv(parts.shape[1], _COLUMNS))](
            parts, weights.contiguous(), out, parts.shape[1],
            SLOTS=slots, WEIGHTED=weighted, BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _spread(
    gradient: torch.Tensor, parts: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `_combine`: of the parts, and float32 `[M, S]` of the weights."""
    of_parts, of_weights = torch.empty_like(parts), torch.empty_like(weights)
    if parts.numel():
        columns = parts.shape[1]
        spread_kernel[tuple(weights.shape)](
            gradient, parts, weights, of_parts, of_weights, columns,
            SLOTS=weights.shape[1], BLOCK=power_of_two(columns), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return of_parts, of_weights


def _weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, chunks: tuple[torch.Tensor, torch.Tensor], *,
    total: torch.Tensor | None,
    gradient_index: torch.Tensor | None = None, x_index: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return float32 gradients of all experts' matrices, `[E, N, K]`; goes on from `total`."""
    places, first_chunk = chunks
    experts, n, k = len(first_chunk) - 1, gradient.shape[1], x.shape[1]
    fresh = total is None
    if total is None:
        total = torch.empty(experts, n, k, dtype=torch.float32, device=x.device)
    if total.numel():
        columns, stages = (64, 2) if x.dtype == torch.float32 else (128, 3)
        grid = (experts, triton.cdiv(n, columns), triton.cdiv(k, columns))
        expert_weight_gradient_kernel[grid](
            gradient, x, total, places, first_chunk, gradient_index, x_index, n, k,
            gradient.stride(0), x.stride(0), GATHER_GRADIENT=gradient_index is not None,
            GATHER_X=x_index is not None, FRESH=fresh, BLOCK_N=columns, BLOCK_K=columns, ROWS=CHUNK,
            PRECISION="ieee", num_warps=8, num_stages=stages,
        )  # fmt: skip
    return total


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        count: int,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, experts, weights, *matrices)
        ctx.sums = next_op_sums()
        places = _Places.of(experts, num_experts=count)
        gate, up, down = (torch.stack(matrices[i * count : (i + 1) * count]) for i in range(3))
        return _combine(_forward(row_major(hidden), places, gate, up, down)[2], weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, experts, weights, *matrices = ctx.saved_tensors
        count = len(matrices) // 3
        hidden, weights, gradient = row_major(hidden), weights.contiguous(), aligned(gradient)
        places = _Places.of(experts, num_experts=count)
        gate, up, down = (torch.stack(matrices[i * count : (i + 1) * count]) for i in range(3))
        gates, ups, outputs = _forward(hidden, places, gate, up, down)
        of_outputs, of_weights = _spread(gradient, outputs, weights)
        of_inner = _project(of_outputs, down, places, transposed=False, source=places.cells)
        of_gates, of_ups = silu_mul_gradient(gates, ups, of_inner)
        # As `linear_input_gradient`: each product rounded, the sum in float32 rounded once.
        of_x = _project(of_gates, gate, places, transposed=False, target=places.cells).float()
        of_x += _project(of_ups, up, places, transposed=False, target=places.cells)
        of_hidden = _combine(of_x.to(hidden.dtype), weights, weighted=False)
        chunks = places.chunks(len(hidden))
        of_matrices: list[torch.Tensor | None] = []
        for kind, (left, right, left_index, right_index) in enumerate(
            (
                (of_gates, hidden, None, places.rows),
                (of_ups, hidden, None, places.rows),
                (of_outputs, silu_mul(gates, ups), places.cells, None),
            )
        ):
            total = _weight_gradient(
                left, right, chunks, total=ctx.sums.total(kind), gradient_index=left_index,
                x_index=right_index,
            )  # fmt: skip
            rounded = ctx.sums.rounded(kind, total, hidden.dtype)
            of_matrices += [None] * count if rounded is None else rounded.unbind(0)
        return of_hidden, None, of_weights, None, *of_matrices
