"""The reference policy of the KL term: the run's initial weights, held on the host.

Invariant: inside `Reference.swapped_in()` the masters hold exactly the initial weights; after it,
however it ends, they hold bit for bit what they held before. A resumed run's reference is that of
the run: it is read from the initial folder, never from the checkpoint.

    reference = Reference(parameter_shards(model), compute_dtype=torch.bfloat16)   # at the start
    with reference.swapped_in(parameter_shards(model)):
        logprobs, _ = model(slot)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from engines.train.fsdp2.sharding import Shard


class Reference:
    """This rank's rows of the initial weights, in the compute dtype.

    The forward only ever sees weights in the compute dtype, so keeping more bits would change
    nothing.
    """

    def __init__(self, initial: Mapping[str, Shard], *, compute_dtype: torch.dtype) -> None:
        self._rows = {
            name: shard.local.to(compute_dtype, copy=True) for name, shard in initial.items()
        }

    @contextmanager
    def swapped_in(self, live: Mapping[str, Shard]) -> Iterator[None]:
        """Put the initial weights into the live masters for the duration of the block."""
        kept = {name: shard.local.clone() for name, shard in live.items()}
        try:
            for name, shard in live.items():
                shard.local.copy_(self._rows[name])
            yield
        finally:
            for name, shard in live.items():
                shard.local.copy_(kept[name])
