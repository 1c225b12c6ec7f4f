"""Sharding a transformers causal LM by FSDP2, and reading its shards.

Invariants: masters are float32 and sharded along dimension 0, so that a rank owns whole rows; the
forward sees a copy in the compute dtype; a gradient crosses ranks in float32 and is summed, never
averaged.

    shard_model(model, mesh=mesh, compute_dtype=torch.bfloat16, reduction=spec.reduction)
    shards = parameter_shards(model)
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.train.reduction import TreeReduceScatter
from engines.train.shards import Shard
from model_specs.run_spec import StockReduction, TreeReduction


def shard_model(
    model: torch.nn.Module,
    *,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduction: TreeReduction | StockReduction,
    cast_inputs: bool,
) -> None:
    """Shard each decoder layer and the root of a transformers causal LM, in place.

    `cast_inputs` brings what a layer is given to the compute dtype; on the shared ops it has it.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
    )
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
