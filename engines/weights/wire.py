"""Weights on their way between two processes: buckets of raw bytes with name, dtype and shape.

Invariant: `unpack(pack(tensors))` gives the same names, dtypes, shapes and bits in the same order,
whatever the size of a bucket. Nothing is cast here: the sender casts to the wire dtype first.

    for bucket in pack(model_tensors, bucket_mib=64):
        references.append(ray.put(bucket))
    for name, tensor in unpack(ray.get(reference)): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from model_specs.errors import EngineError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTensor:
    """One tensor as bytes."""

    name: str
    """Logical (checkpoint) name."""
    dtype: str
    """torch's name without the prefix, `float32` or `bfloat16`."""
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    """1-D, row-major elements in the machine's byte order."""


WireBucket = tuple[WireTensor, ...]


def pack(
    named_tensors: Iterable[tuple[str, torch.Tensor]], *, bucket_mib: int
) -> Iterator[WireBucket]:
    """Yield buckets of at most `bucket_mib` MiB; a larger tensor has a bucket of its own.

    The arrays share memory with contiguous tensors: put a bucket into the object store, or consume
    it, before the tensors change.

    Args:
        named_tensors: (logical name, CPU tensor) pairs, already in the wire dtype.
        bucket_mib: Size bound in MiB.
    """
    limit = bucket_mib * 2**20
    bucket: list[WireTensor] = []
    size = 0
    for name, tensor in named_tensors:
        wire = to_wire(name, tensor)
        if bucket and size + wire.data.nbytes > limit:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(wire)
        size += wire.data.nbytes
    if bucket:
        yield tuple(bucket)


def unpack(bucket: WireBucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (logical name, tensor) of a bucket; tensors share its memory: do not write to them.

    Raises:
        EngineError: The number of bytes does not fit dtype and shape, or the dtype is unknown.
    """
    import torch

    for wire in bucket:
        dtype = getattr(torch, wire.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise EngineError(f"{wire.name}: unknown wire dtype {wire.dtype!r}")
        expected = int(np.prod(wire.shape, dtype=np.int64)) * dtype.itemsize
        if wire.data.nbytes != expected:
            raise EngineError(
                f"{wire.name}: {wire.data.nbytes} bytes arrived, {wire.dtype} {wire.shape} needs "
                f"{expected}"
            )
        if not expected:  # an empty array has no strides to view it by
            yield wire.name, torch.empty(wire.shape, dtype=dtype)
            continue
        with warnings.catch_warnings():
            # Arrays from the object store are read-only; nobody writes to these tensors.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(wire.data)
        yield wire.name, flat.view(dtype).view(wire.shape)


def resolve(buckets: Iterable[Any]) -> list[WireBucket]:
    """Return the buckets themselves, fetching those that are references into Ray's object store."""
    import ray

    return [ray.get(item) if isinstance(item, ray.ObjectRef) else item for item in buckets]


def to_wire(name: str, tensor: torch.Tensor) -> WireTensor:
    """Return a tensor as bytes in host memory; a contiguous CPU tensor is not copied."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return WireTensor(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=flat.view(torch.uint8).cpu().numpy(),
    )
