"""A mixture of experts: each token through the experts of its slots, added in slot order.

Forward: the rows of an expert are gathered, padded and multiplied as in `linear`, so a row's result
does not depend on which other rows chose the expert. The results of a row are weighted and added in
float32 in the order of its slots (largest weight first), and rounded once.

Backward: the input gradient is added over slots in the same order. The weight gradient of an expert
is summed over the blocks of 64 source rows, left to right; within a block over the rows that chose
it. A block belongs to one sequence, so packing cannot be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from engines.numerics.blocks import ROW_BLOCK, ROW_TILE, pad_rows
from engines.numerics.linear import linear_input_gradient
from engines.numerics.pointwise import silu_mul, silu_mul_gradient
from engines.numerics.products import padded_linear
from engines.numerics.slot_sums import next_op_sums


def expert_mlp(
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate: Sequence[torch.Tensor],
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, `down(silu(gate(x)) * up(x))`.

    Args:
        hidden: `[M, K]`; sequences start at multiples of 64 rows.
        experts: int64 `[M, S]`, distinct within a row, of `route`.
        weights: float32 `[M, S]`.
        gate: for each expert `[inner, K]`, dtype of `hidden`; fused storage is cut by its caller.
        up: for each expert `[inner, K]`.
        down: for each expert `[K, inner]`.

    Returns:
        `[M, K]`, dtype of `hidden`. An expert without a row has a gradient of zeros.
    """
    if not len(gate) == len(up) == len(down):
        raise ValueError(
            f"expert_mlp: {len(gate)} gate, {len(up)} up and {len(down)} down matrices; each "
            "expert has one of each"
        )
    return _Experts.apply(hidden, experts, weights, len(down), *gate, *up, *down)  # type: ignore[no-any-return]


def _project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return padded_linear(x, weight)[: x.shape[0]]


def _places(experts: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (ascending) and slots of an expert."""
    rows, slots = (experts == expert).nonzero(as_tuple=True)
    return rows, slots


def _add_over_slots(parts: torch.Tensor) -> torch.Tensor:
    """Add float32 `[M, S, K]` over slots from left to right."""
    total = parts[:, 0].clone()
    for slot in range(1, parts.shape[1]):
        total += parts[:, slot]
    return total


def _add_block_products(
    total: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, rows: torch.Tensor
) -> None:
    """Add to float32 `[N, K]` the products of the rows of each source block, left to right."""
    _, counts = torch.unique_consecutive(rows // ROW_BLOCK, return_counts=True)
    sizes = counts.tolist()
    for block_gradient, block_x in zip(gradient.split(sizes), x.split(sizes), strict=True):
        left, right = (pad_rows(t.float(), ROW_TILE) for t in (block_gradient, block_x))
        total.addmm_(left.t(), right)


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
        gates, ups, downs = (matrices[i * count : (i + 1) * count] for i in range(3))
        outputs = hidden.new_zeros(*experts.shape, hidden.shape[1])
        for expert in range(count):
            rows, slots = _places(experts, expert)
            if len(rows):
                x = hidden[rows]
                inner = silu_mul(_project(x, gates[expert]), _project(x, ups[expert]))
                outputs[rows, slots] = _project(inner, downs[expert])
        ctx.save_for_backward(hidden, experts, weights, outputs, *matrices)
        ctx.sums = next_op_sums()
        return _add_over_slots(outputs.float() * weights[..., None]).to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, experts, weights, outputs, *matrices = ctx.saved_tensors
        count = len(matrices) // 3
        gates, ups, downs = (matrices[i * count : (i + 1) * count] for i in range(3))
        upstream = gradient.float()[:, None]
        of_weights = pad_rows(upstream * outputs.float(), ROW_TILE).sum(-1)[: len(hidden)]
        of_outputs = (upstream * weights[..., None]).to(hidden.dtype)
        of_hidden = torch.zeros_like(outputs, dtype=torch.float32)
        totals = []
        for index, matrix in enumerate(matrices):
            total = ctx.sums.total(index)
            totals.append(torch.zeros_like(matrix, dtype=torch.float32) if total is None else total)
        for expert in range(count):
            rows, slots = _places(experts, expert)
            if not len(rows):
                continue
            x, of_output = hidden[rows], of_outputs[rows, slots]
            gate, up = _project(x, gates[expert]), _project(x, ups[expert])
            of_inner = linear_input_gradient((of_output,), (downs[expert],))
            of_gate, of_up = silu_mul_gradient(gate, up, of_inner)
            of_x = linear_input_gradient((of_gate, of_up), (gates[expert], ups[expert]))
            of_hidden[rows, slots] = of_x.float()
            products = ((of_gate, x), (of_up, x), (of_output, silu_mul(gate, up)))
            for kind, (left, right) in enumerate(products):
                _add_block_products(totals[kind * count + expert], left, right, rows)
        of_hidden = _add_over_slots(of_hidden).to(hidden.dtype)
        of_matrices = [
            ctx.sums.rounded(index, total, hidden.dtype) for index, total in enumerate(totals)
        ]
        return of_hidden, None, of_weights, None, *of_matrices
