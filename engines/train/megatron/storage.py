"""Checkpoints through Megatron's dist_checkpointing (`torch_dist`), under the checkpoint's names.

Every rank holds every tensor, so each is one shard with as many replicas as there are ranks. The
shards are written by a save strategy of our own, in this process: Megatron's default one forks
writers and spawns a manager process that outlives the call. Invariant: what is read is bitwise what
was written, at any number of ranks. The keys and the torch DCP files below are those of
`engines.checkpoint.dcp`, so an export reads the folder as it is.

    write_checkpoint(path, tensors, meta=meta, storage=DistCheckpointing())
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from engines.checkpoint.dcp import last_line
from model_specs.errors import CheckpointError


class DistCheckpointing:
    """`engines.checkpoint.dcp.Storage` for tensors that are whole on every rank."""

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors; a collective."""
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        dist_checkpointing.save(_sharded(tensors), str(path), sharded_strategy=_InProcessSave())

    def read(self, path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of these keys in place; a collective.

        Raises:
            CheckpointError: A key is missing, has another shape, or its file is damaged.
        """
        try:
            loaded = dist_checkpointing.load(_sharded(tensors), str(path))
        except (
            CheckpointException,
            CheckpointingException,
            RuntimeError,
            ValueError,
            KeyError,
            OSError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise CheckpointError(
                f"{path} cannot be loaded: {last_line(error)}; it is damaged or not of this model"
            ) from error
        with torch.no_grad():
            for key, tensor in tensors.items():
                tensor.copy_(loaded[key])


class _PackedObjects(DefaultSavePlanner):
    """Writes the bytes of an object as they are, where torch would pack them once more."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Writes the main replicas of whole tensors, and of Megatron's own objects, synchronously.

    megatron-core 0.19 keeps what is common to all ranks as such an object, 0.16 in a file beside.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write this rank's main replicas; a collective."""
        mine: dict[str, Any] = {}
        for shard in sharded_state_dict.values():
            if not is_main_replica(shard.replica_id):
                continue
            if isinstance(shard, ShardedObject):
                packed = io.BytesIO()
                torch.save([shard.data], packed)  # a list of the parts that one rank holds
                mine[shard.unique_key] = packed
            else:
                mine[shard.key] = shard.data
        planner = _PackedObjects(flatten_state_dict=False)
        checkpoint.save(mine, checkpoint_id=str(checkpoint_dir), planner=planner)


def _sharded(tensors: Mapping[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=dist.get_rank())
        for key, tensor in tensors.items()
    }
