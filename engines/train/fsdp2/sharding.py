"""FSDP2 over gloo: joining the ranks, sharding a model, and reading its shards.

Invariants: masters are float32 and sharded along dimension 0, so that a rank owns whole rows; the
forward sees a copy in the compute dtype; a gradient crosses ranks in float32 and is summed, never
averaged. A digest of a sharded tensor is merged from the ranks' parts and never gathers the tensor.

    mesh = join(rendezvous, rank=0, world_size=2)
    shard_model(model, mesh=mesh, compute_dtype=torch.bfloat16, reduction=spec.reduction)
    digests = merged_digests(parameter_shards(model))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.provenance.tensor_digest import partial_of_tensor
from engines.train.reduction import TreeReduceScatter
from model_specs.errors import EngineError, SpecError
from model_specs.run_spec import StockReduction, TreeReduction

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
    sharded: DTensor
    """The distributed tensor whose layout this is; `local` need not be its storage."""

    def like(self, local: torch.Tensor) -> Shard:
        """Return another tensor of the same layout."""
        return replace(self, local=local)


def join(rendezvous: str, *, rank: int, world_size: int) -> DeviceMesh:
    """Join the process group of all ranks over gloo; `rendezvous` is `file://` and a fresh path.

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
            "gloo",
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
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))


def shard_model(
    model: torch.nn.Module,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduction: TreeReduction | StockReduction,
) -> None:
    """Shard each decoder layer and the root of a transformers causal LM, in place.

    Raises:
        SpecError: A stock reduction is run at another number of ranks than the spec says.
    """
    if isinstance(reduction, StockReduction) and reduction.world_size != mesh.size():
        raise SpecError(
            f"reduction.world_size={reduction.world_size} decides the bits of a stock reduction, "
            f"but {mesh.size()} ranks were started; set execution.trainer_ranks to it"
        )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # The root is resharded after forward too: its gathered copy would otherwise outlive a forward
    # without backward and hide a change of the weights from the next one.
    for module in (*model.get_submodule("model.layers").children(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # neither setting is recursive
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if isinstance(reduction, TreeReduction):
                module.set_custom_reduce_scatter(TreeReduceScatter())


def parameter_shards(model: torch.nn.Module) -> dict[str, Shard]:
    """Return name -> shard of the live masters, in the model's order; a tied head is not listed."""
    shards = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        shards[name] = Shard(
            local=parameter.detach().to_local(),
            shape=tuple(parameter.shape),
            row_offset=_row_offset(parameter),
            sharded=parameter,
        )
    return shards


def _row_offset(tensor: DTensor) -> int:
    """Rows are cut as `torch.chunk` does: equal chunks rounded up, the last ones shorter."""
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    return min(rows, tensor.device_mesh.get_local_rank() * -(-rows // ranks))


def distributed(shard: Shard, local: torch.Tensor) -> DTensor:
    """Return `local` (same rows, any trailing shape) as a tensor of the shard's layout."""
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
    whole = distributed(shard, shard.local if local is None else local).full_tensor()
    assert type(whole) is torch.Tensor, type(whole)
    return whole


def merged_digests(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return name -> digest on every rank, merged from the ranks' parts; a collective."""
    parts = {
        name: partial_of_tensor(
            shard.local, name=name, shape=shard.shape, row_offset=shard.row_offset
        )
        for name, shard in shards.items()
    }
    first, *others = all_objects(parts)
    for other in others:
        first = {name: part.merge(other[name]) for name, part in first.items()}
    return {name: part.hexdigest() for name, part in first.items()}


def all_objects(value: Any) -> list[Any]:
    """Return every rank's small value in rank order; a collective."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
