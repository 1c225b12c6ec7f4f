"""A sleeping trainer: its tensors lie on the host, and their memory on the device is free.

Masters, moments and the model's own parameters and buffers are moved storage by storage: each
storage is copied to the host, shrunk to nothing and, on waking, grown and filled again. Tensors,
views and everything that refers to them stay the same objects. A reference's rows lie on the host
anyway (`engines.train.reference`) and stay. Invariant: after waking every byte is what it was;
asleep, no storage of what is moved has any.

    resident = Resident(lambda: [*masters, *moments])
    resident.sleep()
    resident.wake()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from engines.memory import process_memory
from model_specs.errors import EngineError


class Resident:
    """The tensors of a process that are moved to the host together."""

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`tensors` returns plain tensors; several may share one storage."""
        self._tensors = tensors
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self.is_asleep = False

    def sleep(self) -> dict[str, float]:
        """Move everything to the host; return MiB in use before and after.

        Raises:
            EngineError: It sleeps already.
        """
        if self.is_asleep:
            raise EngineError("the trainer sleeps already; wake it before it is sent to sleep")
        before = process_memory()
        for storage in _storages(self._tensors()):
            # Pinned memory is copied several times as fast, and torch keeps it for the next time.
            held = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
            held.copy_(_bytes(storage))
            self._held.append((storage, held))
        for storage, _ in self._held:
            storage.resize_(0)
        self.is_asleep = True
        return {"before_mib": before, "after_mib": process_memory(release=True)}

    def wake(self) -> dict[str, float]:
        """Bring everything back; return MiB in use before and after.

        Raises:
            EngineError: It is awake.
        """
        if not self.is_asleep:
            raise EngineError("the trainer is awake; only a sleeping one can be woken")
        before = process_memory()
        for storage, held in self._held:
            storage.resize_(held.numel())
            _bytes(storage).copy_(held)
        self._held = []
        self.is_asleep = False
        return {"before_mib": before, "after_mib": process_memory()}


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage with memory once, in the order of the tensors."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


class Sleeps:
    """The part of a trainer rank that sleeps; asleep, `engines.host.Host` lets little through."""

    _resident: Resident

    @property
    def is_asleep(self) -> bool:
        """Whether the state lies on the host."""
        return self._resident.is_asleep

    def sleep(self) -> dict[str, float]:
        """Move the whole state to the host; return MiB in use before and after."""
        return self._resident.sleep()

    def wake(self) -> dict[str, float]:
        """Bring the whole state back; return MiB in use before and after."""
        return self._resident.wake()
