"""What a push consists of, known before any tensor moves: buckets of named tensors.

Invariant: both sides cut the same buckets and place the same tensors at the same offsets, so that
nothing but bytes has to travel. A tensor begins at a multiple of 256 bytes, as an allocation would.

    layout = plan_buckets(metas, bucket_mib=64)
    fill(buffer, layout[0], tensors)             # sender
    for name, tensor in views(buffer, layout[0]): ...   # receiver: shares the buffer's memory
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_specs.errors import EngineError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256
"""Bytes."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Dtypes of the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """A tensor of a push, without its values."""

    name: str
    """Logical (checkpoint) name."""
    dtype: str
    """`float32` or `bfloat16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Bucket = tuple[TensorMeta, ...]
Layout = tuple[Bucket, ...]


def plan_buckets(metas: Iterable[TensorMeta], *, bucket_mib: int) -> Layout:
    """Return buckets of at most `bucket_mib` MiB; a larger tensor has a bucket of its own."""
    limit = bucket_mib * 2**20
    buckets: list[list[TensorMeta]] = []
    size = 0
    for meta in metas:
        if not buckets or size + _padded(meta) > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(meta)
        size += _padded(meta)
    return tuple(tuple(bucket) for bucket in buckets)


def buffer_bytes(layout: Layout) -> int:
    """Return the size of a buffer that takes any one of the buckets."""
    return max(sum(_padded(meta) for meta in bucket) for bucket in layout)


def fill(buffer: torch.Tensor, bucket: Bucket, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors of one bucket into the buffer (uint8 [n], on any device).

    Raises:
        EngineError: A tensor is another than the bucket's, or is not plain: an asynchronous or
            distributed tensor may still be on its way, and would be copied before it has arrived.
    """
    for (name, tensor), (wanted, view) in zip(tensors, views(buffer, bucket), strict=True):
        require_plain(name, tensor)
        if name != wanted or tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise EngineError(
                f"{name} {tensor.dtype} {tuple(tensor.shape)} was to be sent where the layout of "
                f"the push has {wanted} {view.dtype} {tuple(view.shape)}; the trainer's tensors "
                "are not in the order of its shards"
            )
        view.copy_(tensor)


def views(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (logical name, tensor in the buffer's memory) of a bucket."""
    import torch

    offset = 0
    for meta in bucket:
        part = buffer[offset : offset + meta.num_bytes]
        yield meta.name, part.view(getattr(torch, meta.dtype)).view(meta.shape)
        offset += _padded(meta)


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Require a tensor without a wrapper: whole, and with nothing pending.

    Raises:
        EngineError: It is a distributed or asynchronous tensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise EngineError(
            f"{name} is a {type(tensor).__name__}, not a plain tensor: its values may be sharded "
            "or still on their way; gather it and wait for it before it is sent"
        )


def _padded(meta: TensorMeta) -> int:
    return meta.num_bytes + -meta.num_bytes % ALIGNMENT
