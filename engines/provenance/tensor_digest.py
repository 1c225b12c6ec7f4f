"""The torch half of the tensor digest: the same digests, read from a tensor's own storage.

Invariant: `digest_tensor(name, t) == digest_array(name, array of t's bits, dtype)`; a contiguous
CPU tensor, or a slice of rows or columns of one, is read in place. A tensor on another device is
copied to the host first, bit by bit.

    part = partial_of_tensor(local_rows, name="lm_head.weight", shape=(512, 64), row_offset=256)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engines.provenance.digest import ITEM_SIZES, PartialDigest, matrix_shape, partial_of

_CONTAINERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that goes into a digest: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


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
    # `view(dtype)` to a container of equal size never copies and needs no unit stride.
    array = block.view(_CONTAINERS[tensor.element_size()]).cpu().numpy()
    return partial_of(
        array,
        name=name,
        dtype=dtype,
        shape=whole,
        row_offset=row_offset,
        column_offset=column_offset,
    )


def digest_tensor(name: str, tensor: torch.Tensor) -> str:
    """Digest a whole tensor; 32 hexadecimal digits."""
    return partial_of_tensor(tensor, name=name).hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digest whole tensors; name -> digest, in the order given."""
    return {name: digest_tensor(name, tensor) for name, tensor in tensors.items()}
