"""What one trainer rank does in a push: cast, flip on purpose, digest, keep, and put into buckets.

Invariant: what is digested as sent is the tensor that then goes into the bucket, in the wire dtype,
whole and complete. Gathering a tensor is a collective, so every rank goes through all buckets, also
where it sends none.

    sending = Sending(trainer.wire_tensors(), layout, sender, engines=2)
    attachments = sending.attachments
    payload = sending.put(0, taken=[])
    digests = sending.end(taken=[0, 0])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from engines.contracts import Flip
from engines.faults import choose_name, flip_bit
from engines.provenance.tensor_digest import digest_tensors, dtype_name
from engines.train.evidence import keep_tensors
from engines.train.shards import Shard
from engines.weights.layout import Layout, TensorMeta, plan_buckets
from engines.weights.transport import Sender, open_sender, require_taken
from engines.weights.wire import pack
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec

DIGESTED_TOGETHER = 16
"""Tensors that are cast, then digested in one pass, before the first of them goes on."""


class WireStream:
    """The tensors of a push in order; afterwards their digests, and the tensors if kept."""

    def __init__(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        names: Iterable[str],
        *,
        flip: Flip | None,
        keep_to: str | None,
    ) -> None:
        self._tensors = tensors
        self._flip = flip if flip is not None and flip.probe == "sent" else None
        self._chosen = choose_name(names, self._flip) if self._flip else None
        self._keep_to = keep_to
        self.digests: dict[str, str] = {}
        """Name -> digest of what was sent; complete when the stream is at its end."""
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, count: int) -> list[tuple[str, torch.Tensor]]:
        """Return the next tensors, flipped where that was asked for, and digest them together."""
        tensors = dict(islice(self._tensors, count))
        if self._flip is not None and self._chosen in tensors:
            flip_bit(tensors[self._chosen], self._flip.element, self._flip.bit)
        self.digests |= digest_tensors(tensors)
        if self._keep_to is not None:
            self._kept |= tensors
        return list(tensors.items())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while tensors := self.take(DIGESTED_TOGETHER):
            yield from tensors

    def write_kept(self) -> None:
        """Write `sent.safetensors`, where it was asked for."""
        if self._keep_to is not None:
            keep_tensors(self._keep_to, "sent", self._kept)


class Sending:
    """One push of this rank."""

    def __init__(
        self, stream: WireStream, layout: Layout, sender: Sender, *, engines: int, rank: int
    ) -> None:
        self._stream = stream
        self._layout, self._sender = layout, sender
        self._engines, self._rank = engines, rank
        self.attachments: Mapping[int, Any] = sender.begin(layout)
        """Engine index -> what its receiver attaches."""

    def put(self, index: int, taken: Sequence[int]) -> Any:
        """Put the next bucket; `taken` is the bucket that each engine took last.

        Raises:
            EngineError: An engine has not taken the bucket before.
        """
        require_taken(index, taken, engines=self._engines)
        payload = self._sender.put(index, self._stream.take(len(self._layout[index])))
        return payload if self._rank == 0 else None

    def end(self, taken: Sequence[int]) -> dict[str, str]:
        """Free the sender's memory; return name -> digest of what was sent."""
        require_taken(len(self._layout), taken, engines=self._engines)
        self._sender.end()
        if self._rank == 0:
            self._stream.write_kept()
        return self._stream.digests


class SendsWeights(ABC):
    """The part of a trainer rank that sends; all methods are collectives."""

    spec: RunSpec
    _rank: int
    _world_size: int
    _compute_dtype: torch.dtype
    _shards: dict[str, Shard]
    _sender: Sender | None = None
    _sending: Sending | None = None
    _num_engines = 0

    @abstractmethod
    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor in the wire dtype), plain and independent of the masters."""

    def send(
        self, *, version: int, flip: Flip | None = None, keep_to: str | None = None
    ) -> tuple[list[Any], dict[str, str]]:
        """Cast to the wire dtype; return references to all buckets (of rank 0), name -> digest."""
        stream = self._wire_stream(flip, keep_to)
        references = []
        for bucket in pack(stream, bucket_mib=self.spec.execution.bucket_mib):
            if self._rank == 0:
                import ray

                references.append(ray.put(bucket))
        if self._rank == 0:
            stream.write_kept()
        return references, stream.digests

    def connect(self, transport: str, *, engines: int, rendezvous: str) -> None:
        """Open this rank's end of the way to the engines; see `engines.weights.push`."""
        self._num_engines = engines
        self._sender = open_sender(
            transport,
            device=self.spec.execution.device,
            rank=self._rank,
            world_size=self._world_size,
            engines=engines,
            rendezvous=rendezvous,
        )

    def begin_push(
        self, *, flip: Flip | None = None, keep_to: str | None = None
    ) -> tuple[Layout, Mapping[int, Any]]:
        """Start a push; return its layout and engine index -> what that engine attaches.

        Raises:
            EngineError: Trainer and engines are not connected.
        """
        if self._sender is None:
            raise EngineError("trainer and engines are not connected; call connect first")
        dtype = dtype_name(self._compute_dtype)
        metas = (
            TensorMeta(name=name, dtype=dtype, shape=shard.shape)
            for name, shard in self._shards.items()
        )
        layout = plan_buckets(metas, bucket_mib=self.spec.execution.bucket_mib)
        self._sending = Sending(
            self._wire_stream(flip, keep_to),
            layout,
            self._sender,
            engines=self._num_engines,
            rank=self._rank,
        )
        return layout, self._sending.attachments

    def put_bucket(self, index: int, taken: Sequence[int]) -> Any:
        """Put one bucket, all engines having taken the one before."""
        return self._current().put(index, taken)

    def end_push(self, taken: Sequence[int]) -> dict[str, str]:
        """End a push; return name -> digest of what was sent."""
        digests = self._current().end(taken)
        self._sending = None
        return digests

    def _current(self) -> Sending:
        if self._sending is None:
            raise EngineError("no push is going on; call begin_push first")
        return self._sending

    def _wire_stream(self, flip: Flip | None, keep_to: str | None) -> WireStream:
        return WireStream(self.wire_tensors(), self._shards, flip=flip, keep_to=keep_to)
