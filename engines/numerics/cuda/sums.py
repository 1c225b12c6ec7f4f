"""Sums of squares on the device: float64, rows halved to one number, as on the CPU.

Multiplication and addition of float64 round alike everywhere, so these are the CPU's bits. Rows of
one padded width, of any number of tensors, are summed in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engines.numerics.cuda.groups import owner_of
from engines.numerics.cuda.layout import power_of_two
from engines.numerics.cuda.tables import table_of
from engines.numerics.sums import square_tree

_CHUNK = 1 << 26
"""Elements squared at a time, so that float64 copies stay below a gigabyte; it decides no bit."""
_WIDEST = 8192
"""Elements of the widest row that a program holds; a wider one is halved by torch."""
_ELEMENTS = 2048
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIELDS = tl.constexpr(5)


@triton.jit(do_not_specialize=["tensors"])
def _square_kernel(
    table_ptr, first_ptr, out_ptr, tensors,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = owner_of(program, first_ptr, tensors)
    entry = table_ptr + tensor.to(tl.int64) * _FIELDS
    x_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    rows, columns, stride = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    row = (program - tl.load(first_ptr + tensor)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    x = tl.load(
        x_ptr + row[:, None] * stride + column[None, :],
        mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0,
    ).to(tl.float64)  # fmt: skip
    x = x * x
    for halving in tl.static_range(HALVINGS):
        # The lower half plus the upper half: one addition, so no order is left to choose.
        x = tl.sum(tl.reshape(x, [ROWS, 2, WIDTH >> (halving + 1)]), axis=1)
    place = out_ptr + tl.load(entry + 4) + row
    tl.store(place, tl.reshape(x, [ROWS]), mask=row < rows)


@torch.no_grad()
def row_square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each index of the first dimension, float64 `[rows]`."""
    return many_row_square_sums([x])[0]


@torch.no_grad()
def many_row_square_sums(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `row_square_sums` of each of many tensors, on one device."""
    matrices = [x.detach().reshape(x.shape[0], math.prod(x.shape[1:])) for x in tensors]
    device = matrices[0].device if matrices else None
    flat = torch.empty(sum(len(matrix) for matrix in matrices), dtype=torch.float64, device=device)
    results = list(flat.split([len(matrix) for matrix in matrices]))
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        width = power_of_two(matrix.shape[1])
        if not matrix.numel() or width > _WIDEST or matrix.dtype not in _TYPES:
            results[index].copy_(square_tree(tensors[index], chunk=_CHUNK))
        else:
            groups.setdefault((matrix.dtype, width), []).append(index)
    for (dtype, width), indices in groups.items():
        rows = max(1, _ELEMENTS // width)
        chosen = [matrices[index].contiguous() for index in indices]
        table = table_of(
            [
                [x.data_ptr(), *x.shape, x.stride(0), results[index].storage_offset()]
                for index, x in zip(indices, chosen, strict=True)
            ],
            [triton.cdiv(len(x), rows) for x in chosen],
            flat.device,
        )
        _square_kernel[(table.programs,)](
            table.rows, table.first, flat, len(chosen), DTYPE=_TYPES[dtype], ROWS=rows,
            WIDTH=width, HALVINGS=width.bit_length() - 1, num_warps=4 if width <= 2048 else 8,
        )  # fmt: skip
    return results
