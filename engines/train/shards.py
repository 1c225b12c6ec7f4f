"""What a rank holds of each logical tensor, and how ranks join and read it as a whole.

A tensor has the name and layout of its Hugging Face checkpoint, whatever trains it. Invariants: a
rank owns whole rows; a digest is merged from the ranks' parts and never gathers the tensor; where
every rank holds all rows, their digests must agree, or the replicas have drifted apart.

    join(rendezvous, rank=0, world_size=2)
    digests = merged_digests(shards)
    whole = gathered(shards["model.norm.weight"])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engines.provenance.tensor_digest import TensorBlock, partials_of_tensors
from model_specs.errors import EngineError

JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest wait for another rank, at the start and in any collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's rows of one logical tensor."""

    local: torch.Tensor
    """A plain tensor; may have no rows."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    row_offset: int
    sharded: DTensor | None
    """The distributed tensor whose layout this is; None where every rank holds the whole."""

    def like(self, local: torch.Tensor) -> Shard:
        """Return another tensor of the same layout."""
        return replace(self, local=local)


def replicated(tensor: torch.Tensor) -> Shard:
    """Return the shard of a tensor that every rank holds as a whole."""
    return Shard(local=tensor, shape=tuple(tensor.shape), row_offset=0, sharded=None)


def join(rendezvous: str, *, rank: int, world_size: int) -> None:
    """Join the process group of all ranks, over gloo and, for tensors on a GPU, NCCL.

    Args:
        rendezvous: `file://` and a fresh path.
        rank: Of [0, world_size).
        world_size: Number of ranks.

    Raises:
        EngineError: This process is in a group already, or the others did not come.
    """
    if dist.is_initialized():
        raise EngineError(
            f"this process already is rank {dist.get_rank()} of {dist.get_world_size()}; one "
            "process holds one trainer: close the other first"
        )
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=JOIN_TIMEOUT,
        )
    except (RuntimeError, dist.DistError) as error:
        raise EngineError(
            f"rank {rank} of {world_size} could not join at {rendezvous}: {error}; every start "
            "needs a fresh rendezvous file that all ranks can reach"
        ) from error


def distributed(shard: Shard, local: torch.Tensor) -> torch.Tensor:
    """Return `local` (same rows, any trailing shape) as a tensor of the shard's layout."""
    if shard.sharded is None:
        return local
    shape = (shard.shape[0], *local.shape[1:])
    return DTensor.from_local(
        local,
        shard.sharded.device_mesh,
        shard.sharded.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def gathered(shard: Shard, local: torch.Tensor | None = None) -> torch.Tensor:
    """Return the whole tensor on every rank, plain and complete (nothing pending); a collective.

    Args:
        shard: The layout.
        local: Gathered instead of the shard's own rows, in any dtype and trailing shape.
    """
    local = shard.local if local is None else local
    if dist.get_world_size() == 1:
        return local
    tensor = distributed(shard, local)
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert type(whole) is torch.Tensor, type(whole)
    return whole


def merged_digests(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return name -> digest on every rank, merged from the ranks' parts; a collective.

    Raises:
        EngineError: A tensor that every rank holds as a whole is not the same on all of them.
    """
    parts = partials_of_tensors(
        TensorBlock(shard.local, name, shard.shape, shard.row_offset)
        for name, shard in shards.items()
    )
    by_rank = all_objects({part.name: part for part in parts})
    digests = {}
    for name, shard in shards.items():
        first, *others = (ranks[name] for ranks in by_rank)
        for rank, other in enumerate(others, start=1):
            if shard.sharded is not None:
                first = first.merge(other)
            elif other.hexdigest() != first.hexdigest():
                raise EngineError(
                    f"{name}: rank {rank} holds {other.hexdigest()}, rank 0 holds "
                    f"{first.hexdigest()}; replicas that every rank computes for itself have "
                    "drifted apart: a rank runs on other hardware or other code"
                )
        digests[name] = first.hexdigest()
    return digests


def all_objects(value: Any) -> list[Any]:
    """Return every rank's small value in rank order; a collective."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
