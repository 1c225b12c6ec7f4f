"""The torch half of the tensor digest: the same digests, read from a tensor's own storage.

Invariant: `digest_tensor(name, t) == digest_array(name, array of t's bits, dtype)`; a contiguous
CPU tensor, or a slice of rows or columns of one, is read in place. A tensor on CUDA is summed
there: two numbers come to the host.

    part = partial_of_tensor(local_rows, name="lm_head.weight", shape=(512, 64), row_offset=256)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from engines.provenance.digest import ITEM_SIZES, PartialDigest, matrix_shape, partial_of
from engines.provenance.evidence_time import evidence

_CONTAINERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that goes into a digest: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@evidence
def partial_of_tensor(
    tensor: torch.Tensor,
    *,
    name: str,
    shape: Sequence[int] | None = None,
    row_offset: int = 0,
    column_offset: int = 0,
) -> PartialDigest:
    """Digest one block of a tensor.

    Args:
        tensor: The block, of any dtype in `ITEM_SIZES`, laid out as `digest.partial_of` says.
        name: Logical name.
        shape: Shape of the whole tensor; None where `tensor` is the whole.
        row_offset: First row of the block in the matrix [shape[0], prod(shape[1:])].
        column_offset: First column of it.

    Raises:
        ValueError: a dtype that has no digest, or a block outside of the tensor.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in ITEM_SIZES:
        raise ValueError(f"{name}: dtype {dtype} is not one of {', '.join(ITEM_SIZES)}")
    whole = tuple(tensor.shape) if shape is None else tuple(shape)
    block = tensor.detach()
    if shape is None or block.ndim != 1:
        block = block.reshape(matrix_shape(block.shape))
    if block.is_cuda:
        part = PartialDigest(name=name, dtype=dtype, shape=whole)
        return _on_device(block, part, row_offset=row_offset, column_offset=column_offset)
    # `view(dtype)` to a container of equal size never copies and needs no unit stride. Through
    # DLPack, because `numpy()` would forbid the storage to be shrunk ever after.
    array = np.from_dlpack(block.view(_CONTAINERS[tensor.element_size()]).cpu())
    return partial_of(
        array,
        name=name,
        dtype=dtype,
        shape=whole,
        row_offset=row_offset,
        column_offset=column_offset,
    )


def _on_device(
    block: torch.Tensor, part: PartialDigest, *, row_offset: int, column_offset: int
) -> PartialDigest:
    """Return `part` with the sums over a block that lies on a CUDA device."""
    from engines.numerics.cuda import digest_sums

    rows, columns = matrix_shape(part.shape)
    matrix = block if block.ndim > 1 else block.reshape(-1, max(1, columns))
    end_row, end_column = row_offset + matrix.shape[0], column_offset + matrix.shape[1]
    inside = row_offset >= 0 and column_offset >= 0 and end_row <= rows and end_column <= columns
    if matrix.numel() and not inside:
        raise ValueError(
            f"{part.name}: block [{row_offset}:{end_row}, {column_offset}:{end_column}] is outside "
            f"of the tensor's [{rows}, {columns}] (shape {part.shape})"
        )
    words_per_element = 2 if matrix.element_size() == 8 else 1
    if words_per_element == 2:
        words = matrix.contiguous().view(torch.int32)
    else:
        words = matrix.view(_CONTAINERS[matrix.element_size()])
    sum_a, sum_b = digest_sums(
        words,
        first_index=(row_offset * columns + column_offset) * words_per_element,
        index_step=columns * words_per_element,
    )
    return replace(part, sum_a=sum_a, sum_b=sum_b, count=matrix.numel())


def digest_tensor(name: str, tensor: torch.Tensor) -> str:
    """Digest a whole tensor; 32 hexadecimal digits."""
    return partial_of_tensor(tensor, name=name).hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest whole tensors; name -> digest, in the order given."""
    return {name: digest_tensor(name, tensor) for name, tensor in tensors.items()}
