"""The FSDP2 trainer: a transformers causal LM on the shared ops, sharded by `fully_shard`.

Masters are the sharded parameters themselves; FSDP2 gathers a copy in the compute dtype for each
forward, on one rank for all forwards of an update, and reduces a slot's gradient as soon as its
backward has run.

    trainer = Fsdp2Trainer(spec_json, dcp_dir=folder, rank=0, world_size=1, rendezvous="file://...")
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from engines.train.fsdp2.model import EXACT_OPS, build_model, share_forward
from engines.train.fsdp2.sharding import parameter_shards, shard_model
from engines.train.fsdp2.stock import stock_forward
from engines.train.reduction import BinaryCounter
from engines.train.shards import Shard, gathered
from engines.train.trainer import GrpoTrainer
from model_specs.errors import EngineError
from model_specs.run_spec import TreeReduction


class Fsdp2Trainer(GrpoTrainer):
    """One rank of the FSDP2 trainer."""

    def _build(self) -> dict[str, Shard]:
        """Build, share and shard the model; the masters are its parameters."""
        device = self.spec.execution.device
        if device == "cuda":
            torch.cuda.set_device(self._rank % torch.cuda.device_count())
        mesh = init_device_mesh(device, (self._world_size,), mesh_dim_names=("data",))
        self._counter = BinaryCounter()
        self._model = build_model(self.spec.model, device=device)
        if self.spec.numerics.policy == "aligned":
            share_forward(
                self._model,
                self.spec.model,
                temperature=self.spec.sampling.temperature,
                gradient_checkpointing=self.spec.trainer_options.gradient_checkpointing,
            )
        else:
            stock_forward(self._model, temperature=self.spec.sampling.temperature)
        shard_model(
            self._model,
            mesh=mesh,
            compute_dtype=self._compute_dtype,
            reduction=self.spec.reduction,
            cast_inputs=self.spec.numerics.policy != "aligned",
        )
        return parameter_shards(self._model)

    @contextmanager
    def _unchanged_weights(self) -> Iterator[None]:
        """Keep the gathered copy on one rank, and free it at the end for the next weights.

        It costs launches to make it again for every slot and, where a rank owns all rows, a sixth
        of the memory of masters and moments to keep it.
        """
        model = self._model
        assert isinstance(model, FSDPModule)
        if self._world_size > 1 or self.spec.trainer_options.gradient_checkpointing:
            yield
            return
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            self._free_gathered()

    def _free_gathered(self) -> None:
        """Free every gathered copy, so that the next forward makes one of the masters it finds."""
        assert isinstance(self._model, FSDPModule)
        # First: it decides whether a module that is inside of a forward lets go of its copy.
        self._model.set_reshard_after_forward(True)
        self._model.set_reshard_after_backward(True)
        for module in self._sharded_modules():
            module.reshard()

    def _with_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Masters have the reduced gradients, whichever of the two the model has in its place."""
        yield from super()._with_gradients()
        for name, shard in self._shards.items():
            assert shard.sharded is not None
            yield name, shard.sharded

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def _take_slot_gradient(self) -> None:
        """Under the tree, add the slot; under the stock reduction FSDP2 adds rounds up itself."""
        if isinstance(self.spec.reduction, TreeReduction):
            self._counter.push(self._taken())

    def _take_update_gradient(self) -> dict[str, torch.Tensor]:
        """Return name -> this rank's rows of the summed gradient."""
        tree = isinstance(self.spec.reduction, TreeReduction)
        summed = self._counter.result() if tree else self._taken()
        return dict(zip(self._shards, summed, strict=True))

    def _forget_gradients(self) -> None:
        """Drop sums and gradients, and gathered copies that no backward came to free.

        A copy that stayed would hide the next change of the masters from the next forward, and
        so does an FSDP2 that still waits for the rest of a backward: it gathers none.
        """
        self._counter = BinaryCounter()
        assert isinstance(self._model, FSDPModule)
        for _, parameter in self._with_gradients():
            parameter.grad = None
        self._free_gathered()
        modules = self._sharded_modules()
        if hasattr(FSDPModule, "reset_iter_state"):  # torch 2.11, of the CUDA environment, has none
            self._model.reset_iter_state()
        elif any(m._get_fsdp_state()._training_state != TrainingState.IDLE for m in modules):
            self._model.register_forward_pre_hook(_refuse)

    def _taken(self) -> list[torch.Tensor]:
        """Detach this rank's reduced float32 gradients from the parameters, in order."""
        taken = []
        for name, shard in self._shards.items():
            # The model itself may have the gathered copy in the place of the master.
            parameter = shard.sharded
            assert parameter is not None
            if parameter.grad is None:
                raise EngineError(f"{name} was given no gradient; the forward does not use it")
            taken.append(parameter.grad.to_local())
            parameter.grad = None
        return taken

    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor in the wire dtype), plain and independent of the masters."""
        for name, shard in self._shards.items():
            yield name, gathered(shard, shard.local.to(self._compute_dtype, copy=True))

    def _publish(self) -> None:
        """Do nothing: no gathered copy outlives an update, so the next one is of these masters."""

    def _decoder_layers(self) -> list[torch.nn.Module]:
        return list(self._model.get_submodule("model.layers").children())

    @property
    def _exact_ops(self) -> frozenset[str]:
        return EXACT_OPS


def _refuse(module: torch.nn.Module, args: Any) -> None:
    """Stand before the forward of a model whose FSDP2 cannot be used any more."""
    raise EngineError(
        "an update failed inside of a forward or backward, after which FSDP2 of torch "
        f"{torch.__version__} sees no change of the weights; start the trainer again and load the "
        "last checkpoint"
    )
