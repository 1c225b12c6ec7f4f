"""The reference policy of the KL term: the run's initial weights, held on the host.

Invariant: inside `Reference.swapped_in()` the masters hold exactly the initial weights; after it,
however it ends, they hold bit for bit what they held before, which lies on the host meanwhile: a
reference takes no memory of the device. A resumed run's reference is that of the run: it is read
from the initial folder, never from the checkpoint.

    reference = Reference(shards, compute_dtype=torch.bfloat16, publish=publish)   # at the start
    with reference.swapped_in(shards):
        logprobs, _ = model(slot)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from engines.train.shards import Shard


class Reference:
    """This rank's rows of the initial weights, in the compute dtype.

    The forward only ever sees weights in the compute dtype, so keeping more bits would change
    nothing.
    """

    def __init__(
        self,
        initial: Mapping[str, Shard],
        *,
        compute_dtype: torch.dtype,
        publish: Callable[[], None],
    ) -> None:
        """Copy the rows; `publish` is called after each change of the live masters."""
        self._publish = publish
        self._rows = {
            name: _on_host(shard.local, dtype=compute_dtype) for name, shard in initial.items()
        }

    def rows(self) -> Iterable[torch.Tensor]:
        """Return the tensors that are held, all on the host."""
        return self._rows.values()

    @contextmanager
    def swapped_in(self, live: Mapping[str, Shard]) -> Iterator[None]:
        """Put the initial weights into the live masters for the duration of the block."""
        kept = {
            name: _on_host(shard.local, dtype=shard.local.dtype) for name, shard in live.items()
        }
        try:
            for name, shard in live.items():
                # Moved and then cast: a copy that does both casts on the host, the slower way.
                shard.local.copy_(self._rows[name].to(shard.local.device))
            self._publish()
            yield
        finally:
            for name, shard in live.items():
                shard.local.copy_(kept[name])
            self._publish()


def _on_host(tensor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy on the host, complete when this returns; a cast rounds to nearest even."""
    # Pinned memory is copied several times as fast, and torch keeps it for the next time.
    held = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
    return held.copy_(tensor.to(dtype))
