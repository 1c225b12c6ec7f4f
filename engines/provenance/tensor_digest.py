"""The torch half of the tensor digest: the same digests, read from a tensor's own storage.

Invariant: `digest_tensor(name, t) == digest_array(name, array of t's bits, dtype)`; a contiguous
CPU tensor, or a slice of rows or columns of one, is read in place. Tensors on CUDA are summed
there, all that are asked for together at once: two numbers of each come to the host. So ask for
many together.

    part = partial_of_tensor(local_rows, name="lm_head.weight", shape=(512, 64), row_offset=256)
    parts = partials_of_tensors([TensorBlock(rows, name=name) for name, rows in tensors.items()])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engines.provenance.digest import ITEM_SIZES, PartialDigest, matrix_shape, partial_of
from engines.provenance.evidence_time import device_evidence

_CONTAINERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that goes into a digest: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """One block of a tensor that is to be digested."""

    tensor: torch.Tensor
    """Of any dtype in `ITEM_SIZES`, laid out as `digest.partial_of` says."""
    name: str
    """Logical name."""
    shape: Sequence[int] | None = None
    """Of the whole tensor; None where `tensor` is the whole."""
    row_offset: int = 0
    """First row of the block in the matrix [shape[0], prod(shape[1:])]."""
    column_offset: int = 0
    """First column of it."""


def partial_of_tensor(
    tensor: torch.Tensor,
    *,
    name: str,
    shape: Sequence[int] | None = None,
    row_offset: int = 0,
    column_offset: int = 0,
) -> PartialDigest:
    """Digest one block of a tensor; the arguments are those of `TensorBlock`.

    Raises:
        ValueError: a dtype that has no digest, or a block outside of the tensor.
    """
    return partials_of_tensors([TensorBlock(tensor, name, shape, row_offset, column_offset)])[0]


@device_evidence
def partials_of_tensors(blocks: Iterable[TensorBlock]) -> list[PartialDigest]:
    """Digest blocks of any tensors; those on a CUDA device in one pass.

    Returns:
        One accumulator a block, in the order given.

    Raises:
        ValueError: a dtype that has no digest, or a block outside of the tensor.
    """
    parts: list[PartialDigest] = []
    on_device: dict[torch.device, list[tuple[int, _Words]]] = {}
    for index, block in enumerate(blocks):
        dtype = dtype_name(block.tensor.dtype)
        if dtype not in ITEM_SIZES:
            raise ValueError(f"{block.name}: dtype {dtype} is not one of {', '.join(ITEM_SIZES)}")
        if block.tensor.is_cuda:
            words = _Words.of(block)
            on_device.setdefault(block.tensor.device, []).append((index, words))
            parts.append(words.part)
        else:
            parts.append(_on_host(block, dtype))
    for waiting in on_device.values():
        for (index, _), part in zip(waiting, _summed([w for _, w in waiting]), strict=True):
            parts[index] = part
    return parts


def _matrix_of(block: TensorBlock) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the block's elements as `digest.partial_of` takes them, and the whole shape."""
    tensor = block.tensor.detach()
    whole = tuple(tensor.shape) if block.shape is None else tuple(block.shape)
    if block.shape is None or tensor.ndim != 1:
        tensor = tensor.reshape(matrix_shape(tensor.shape))
    return tensor, whole


def _on_host(block: TensorBlock, dtype: str) -> PartialDigest:
    tensor, whole = _matrix_of(block)
    return partial_of(
        # `view(dtype)` to a container of equal size never copies and needs no unit stride. Through
        # DLPack, because `numpy()` would forbid the storage to be shrunk ever after.
        np.from_dlpack(tensor.view(_CONTAINERS[tensor.element_size()]).cpu()),
        name=block.name,
        dtype=dtype,
        shape=whole,
        row_offset=block.row_offset,
        column_offset=block.column_offset,
    )


@dataclass(frozen=True, slots=True)
class _Words:
    """A block on a CUDA device, as words, and its accumulator without the sums."""

    part: PartialDigest
    words: torch.Tensor
    first_index: int
    index_step: int

    @classmethod
    def of(cls, block: TensorBlock) -> _Words:
        tensor, whole = _matrix_of(block)
        rows, columns = matrix_shape(whole)
        matrix = tensor if tensor.ndim > 1 else tensor.reshape(-1, max(1, columns))
        row, column = block.row_offset, block.column_offset
        end_row, end_column = row + matrix.shape[0], column + matrix.shape[1]
        inside = row >= 0 and column >= 0 and end_row <= rows and end_column <= columns
        if matrix.numel() and not inside:
            raise ValueError(
                f"{block.name}: block [{row}:{end_row}, {column}:{end_column}] is outside of the "
                f"tensor's [{rows}, {columns}] (shape {whole})"
            )
        words_per_element = 2 if matrix.element_size() == 8 else 1
        if words_per_element == 2:
            words = matrix.contiguous().view(torch.int32)
        else:
            words = matrix.view(_CONTAINERS[matrix.element_size()])
        part = PartialDigest(
            name=block.name, dtype=dtype_name(tensor.dtype), shape=whole, count=matrix.numel()
        )
        return cls(
            part,
            words,
            (row * columns + column) * words_per_element,
            columns * words_per_element,
        )


def _summed(blocks: Sequence[_Words]) -> list[PartialDigest]:
    """Return the accumulators of blocks on one device, with their sums."""
    from engines.numerics.cuda import WordBlock, digest_sums

    sums = digest_sums([WordBlock(b.words, b.first_index, b.index_step) for b in blocks])
    return [
        replace(block.part, sum_a=sum_a, sum_b=sum_b)
        for block, (sum_a, sum_b) in zip(blocks, sums, strict=True)
    ]


def digest_tensor(name: str, tensor: torch.Tensor) -> str:
    """Digest a whole tensor; 32 hexadecimal digits."""
    return digest_tensors({name: tensor})[name]


@device_evidence
def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest whole tensors; name -> digest, in the order given."""
    parts = partials_of_tensors(TensorBlock(tensor, name) for name, tensor in tensors.items())
    return {part.name: part.hexdigest() for part in parts}
