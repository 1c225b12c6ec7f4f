"""The three ways of a bucket from a trainer to the rollout engines, behind one small interface.

A push has a layout (`engines.weights.layout`). The sender begins, and what it returns is attached
by each receiver; then bucket after bucket is put and taken; then both end. The driver
(`engines.weights.push`) sees to the order. Invariants: a bucket is overwritten only after every
engine has said that it took the one before; between two pushes neither side holds memory for them;
nothing is sent that is not plain and complete.

- `host`: bytes in host memory, moved by Ray's object store.
- `cuda_ipc`: one buffer that both processes map; on CPU a file in shared memory.
- `nccl`: a broadcast from trainer rank 0 to all engines; on CPU over gloo.

    sender = open_sender("cuda_ipc", device="cuda", rank=0, world_size=1, engines=1, rendezvous=r)
    attachments = sender.begin(layout)
    payload = sender.put(0, tensors)         # receiver.take(0, payload) yields (name, tensor)
    sender.end()
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines.weights.device_memory import export, exportable, import_buffer
from engines.weights.layout import Bucket, Layout, buffer_bytes, fill, require_plain, views
from engines.weights.wire import WireBucket, to_wire, unpack
from model_specs.errors import EngineError

NamedTensors = Sequence[tuple[str, torch.Tensor]]
GROUP_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the other side of a broadcast."""


class Sender(ABC):
    """One trainer rank's end."""

    def begin(self, layout: Layout) -> Mapping[int, Any]:
        """Start a push; return engine index -> what that engine's receiver attaches."""
        self._layout = layout
        return {}

    @abstractmethod
    def put(self, index: int, tensors: NamedTensors) -> Any:
        """Make bucket `index` available and return what travels to the receivers."""

    def end(self) -> None:
        """Give up what the push needed, all receivers having ended."""
        self._layout = ()


class Receiver(ABC):
    """One engine's end."""

    def begin(self, layout: Layout, attachment: Any) -> None:
        """Start a push with what the sender returned for this engine."""
        self._layout = layout

    @abstractmethod
    def take(self, index: int, payload: Any) -> NamedTensors:
        """Return the tensors of bucket `index`; they are valid until the next one is put."""

    def end(self) -> None:
        """Give up what the push needed."""
        self._layout = ()


class HostSender(Sender):
    """Bytes in host memory."""

    def put(self, index: int, tensors: NamedTensors) -> WireBucket:
        """Copy the tensors to the host, whole and complete."""
        for name, tensor in tensors:
            require_plain(name, tensor)
        return tuple(to_wire(name, tensor) for name, tensor in tensors)


class HostReceiver(Receiver):
    """Tensors over the bytes that arrived."""

    def take(self, index: int, payload: WireBucket) -> NamedTensors:
        """Return tensors that share the payload's memory."""
        return list(unpack(payload))


class SharedSender(Sender):
    """A buffer that the engines of this rank map."""

    def __init__(self, device: torch.device, *, engines: Sequence[int]) -> None:
        self._device, self._engines = device, tuple(engines)
        self._buffer: torch.Tensor | None = None
        self._path: Path | None = None

    def begin(self, layout: Layout) -> Mapping[int, Any]:
        """Allocate the buffer and export it once for each engine.

        Raises:
            EngineError: The allocator gave memory that no other process can map.
        """
        super().begin(layout)
        self._unlink()  # of a push that broke off
        if not self._engines:
            return {}
        size = buffer_bytes(layout)
        if self._device.type == "cpu":
            handle, name = tempfile.mkstemp(prefix="lockstep-push-", dir=_shared_folder())
            os.close(handle)
            self._path = Path(name)
            self._buffer = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            return dict.fromkeys(self._engines, (name, size))
        self._buffer = exportable(size)
        return {engine: export(self._buffer) for engine in self._engines}

    def put(self, index: int, tensors: NamedTensors) -> None:
        """Overwrite the buffer with a bucket, and wait until that is done."""
        if self._buffer is None:
            return
        self._unlink()  # every engine maps it by now; whatever ends this process leaves no file
        fill(self._buffer, self._layout[index], tensors)
        _synchronize(self._device)

    def end(self) -> None:
        """Free the buffer; it is gone once no receiver maps it."""
        super().end()
        self._buffer = None
        self._unlink()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _unlink(self) -> None:
        """Take the name of the CPU's buffer away; who maps it keeps it."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


class SharedReceiver(Receiver):
    """The mapping of a sender's buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: torch.Tensor | None = None

    def begin(self, layout: Layout, attachment: Any) -> None:
        """Map the buffer.

        Raises:
            EngineError: It lies on another GPU.
        """
        super().begin(layout, attachment)
        if self._device.type == "cpu":
            name, size = attachment
            self._buffer = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        else:
            self._buffer = import_buffer(attachment)

    def take(self, index: int, payload: Any) -> NamedTensors:
        """Return views of the sender's buffer."""
        assert self._buffer is not None, "take before begin"
        return list(views(self._buffer, self._layout[index]))

    def end(self) -> None:
        """Unmap the buffer."""
        super().end()
        self._buffer = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


class GroupSender(Sender):
    """The source of broadcasts; ranks other than 0 send nothing."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._buffer: torch.Tensor | None = None

    def begin(self, layout: Layout) -> Mapping[int, Any]:
        """Allocate the buffer."""
        super().begin(layout)
        if self._group is not None:
            size = buffer_bytes(layout)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return {}

    def put(self, index: int, tensors: NamedTensors) -> None:
        """Broadcast a bucket; returns when it has left the buffer."""
        if self._group is None or self._buffer is None:
            return
        bucket = self._layout[index]
        fill(self._buffer, bucket, tensors)
        _broadcast(self._group, _used(self._buffer, bucket))
        _synchronize(self._device)

    def end(self) -> None:
        """Free the buffer."""
        super().end()
        self._buffer = None


class GroupReceiver(Receiver):
    """One receiver of broadcasts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._buffer: torch.Tensor | None = None

    def begin(self, layout: Layout, attachment: Any) -> None:
        """Allocate the buffer."""
        super().begin(layout, attachment)
        size = buffer_bytes(layout)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)

    def take(self, index: int, payload: Any) -> NamedTensors:
        """Wait for a bucket and return views of it."""
        assert self._buffer is not None, "take before begin"
        bucket = self._layout[index]
        _broadcast(self._group, _used(self._buffer, bucket))
        _synchronize(self._device)
        return list(views(self._buffer, bucket))

    def end(self) -> None:
        """Free the buffer."""
        super().end()
        self._buffer = None


def open_sender(
    transport: str, *, device: str, rank: int, world_size: int, engines: int, rendezvous: str
) -> Sender:
    """Open a trainer rank's end; with `nccl` rank 0 waits there for all engines.

    Args:
        transport: `execution.transport`.
        device: `cpu` or `cuda`.
        rank: Trainer rank of [0, world_size).
        world_size: Number of trainer ranks.
        engines: Number of rollout engines; engine i shares the GPU of rank i modulo `world_size`.
        rendezvous: Path of a file that does not exist yet, for `nccl`.
    """
    place = _place(device)
    if transport == "host":
        return HostSender()
    if transport == "cuda_ipc":
        mine = [index for index in range(engines) if index % world_size == rank]
        return SharedSender(place, engines=mine)
    if rank:
        return GroupSender(None, place)
    return GroupSender(_group(rendezvous, place, rank=0, size=1 + engines), place)


def open_receiver(
    transport: str, *, device: str, engine_index: int, engines: int, rendezvous: str
) -> Receiver:
    """Open an engine's end; the arguments are those of `open_sender`."""
    place = _place(device)
    if transport == "host":
        return HostReceiver()
    if transport == "cuda_ipc":
        return SharedReceiver(place)
    return GroupReceiver(_group(rendezvous, place, rank=1 + engine_index, size=1 + engines), place)


def _place(device: str) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == "cuda"
        else torch.device("cpu")
    )


def _group(path: str, device: torch.device, *, rank: int, size: int) -> dist.ProcessGroup:
    """Return a group beside the default one, which trainer and vLLM each have for themselves."""
    store = dist.PrefixStore("weights", dist.FileStore(path, size))
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = GROUP_TIMEOUT
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    return group


def _broadcast(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _used(buffer: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The part of the buffer that this bucket fills."""
    return buffer[: buffer_bytes((bucket,))]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _shared_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def require_taken(index: int, taken: Sequence[int], *, engines: int) -> None:
    """Require that every engine has taken the bucket before `index`, which is overwritten next.

    Raises:
        EngineError: One has not: it would read a mixture of two buckets.
    """
    wanted = [index - 1] * engines if index else []
    if list(taken) != wanted:
        raise EngineError(
            f"bucket {index} of a push would overwrite bucket {index - 1}, which {engines} engines "
            f"have to take first; taken so far: {list(taken)}"
        )
