"""The Megatron trainer: GPTModel on the shared ops, data-parallel, with float32 main parameters.

Main parameters, moments and gradients are float32 under the checkpoint's names, whole on every
rank; the model's fused parameters are their copies in the compute dtype. A slot's gradient is read
from the fused parameters, scattered over the ranks in float32 and added as the shared tree does, so
weights, gradients and moments have the digests of every other trainer; the sum is taken apart into
the checkpoint's tensors. What is sent is read from Megatron's own storage.

    trainer = MegatronTrainer(spec_json, dcp_dir=dir, rank=0, world_size=1, rendezvous="file://...")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from engines.checkpoint.dcp import Storage
from engines.train.megatron import parallel
from engines.train.megatron.model import EXACT_OPS, build_model
from engines.train.megatron.names import all_blocks, by_name, write_blocks
from engines.train.megatron.storage import DistCheckpointing
from engines.train.reduction import BinaryCounter, TreeReduceScatter
from engines.train.shards import Shard, replicated
from engines.train.trainer import GrpoTrainer
from model_specs.errors import EngineError
from model_specs.families.decoder import parameter_shapes
from model_specs.run_spec import TreeReduction


class MegatronTrainer(GrpoTrainer):
    """One rank of the Megatron trainer."""

    def _build(self) -> dict[str, Shard]:
        """Build the model and its main parameters."""
        device = self.spec.execution.device
        if device == "cuda":
            torch.cuda.set_device(self._rank % torch.cuda.device_count())
        parallel.start(device)
        model = self._model = build_model(
            self.spec.model,
            compute_dtype=self._compute_dtype,
            temperature=self.spec.sampling.temperature,
            gradient_checkpointing=self.spec.trainer_options.gradient_checkpointing,
            device=device,
        )
        parameters = [(name, value.detach()) for name, value in model.named_parameters()]
        self._blocks = all_blocks(parameters, self.spec.model)
        self._layout = _FlatLayout(
            {name: value.shape for name, value in parameters},
            world_size=self._world_size,
            device=device,
        )
        self._counter = BinaryCounter()
        self._stock_sum: torch.Tensor | None = None
        return {
            name: replicated(torch.empty(shape, device=device))
            for name, shape in parameter_shapes(self.spec.model).items()
        }

    def _publish(self) -> None:
        """Round the main parameters into the model's fused ones."""
        write_blocks(self._blocks, {name: shard.local for name, shard in self._shards.items()})

    def _take_slot_gradient(self) -> None:
        """Scatter the slot's gradient over the ranks, added in rank order, and add it up."""
        flat = self._layout.empty()
        # All at once: one at a time is a launch for each, slot by slot.
        torch._foreach_copy_(list(self._layout.views(flat).values()), self._taken_gradients())
        if isinstance(self.spec.reduction, TreeReduction):
            self._counter.push([self._scattered(flat)])
            return
        dist.all_reduce(flat)
        self._stock_sum = flat if self._stock_sum is None else self._stock_sum.add_(flat)

    def _scattered(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's chunk of the sum over ranks; on one rank all of it, uncopied."""
        if self._world_size == 1:
            return flat
        chunk = flat.new_empty(flat.numel() // self._world_size)
        TreeReduceScatter()(chunk, flat, dist.group.WORLD, dist.ReduceOp.SUM)
        return chunk

    def _take_update_gradient(self) -> dict[str, torch.Tensor]:
        """Gather the summed chunks; every rank has the whole gradient."""
        if isinstance(self.spec.reduction, TreeReduction):
            (flat,) = self._counter.result()
            if self._world_size > 1:
                chunk, flat = flat, self._layout.empty()
                dist.all_gather_into_tensor(flat, chunk)
        else:
            assert self._stock_sum is not None
            flat, self._stock_sum = self._stock_sum, None
        found = all_blocks(self._layout.views(flat).items(), self.spec.model)
        return {
            name: torch.cat([block.rows for block in blocks]) if blocks[1:] else blocks[0].rows
            for name, blocks in by_name(found).items()
        }

    def _forget_gradients(self) -> None:
        self._counter, self._stock_sum = BinaryCounter(), None
        self._model.zero_grad(set_to_none=True)

    def _taken_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the fused parameters in their order, taken off them."""
        gradients = []
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                raise EngineError(f"{name} was given no gradient; the forward does not use it")
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def wire_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor in the wire dtype), read from Megatron's own storage."""
        for name, blocks in by_name(self._blocks).items():
            yield name, torch.cat([block.rows for block in blocks])

    def _storage(self) -> Storage:
        return DistCheckpointing()

    def _decoder_layers(self) -> list[torch.nn.Module]:
        return list(self._model.get_submodule("decoder.layers").children())

    @property
    def _exact_ops(self) -> frozenset[str]:
        return EXACT_OPS

    def environment(self) -> dict[str, Any]:
        """What this process really has, with Megatron's own switches as they are in force."""
        return {**super().environment(), "megatron": parallel.determinism_facts(self._model)}

    def close(self) -> None:
        """Forget Megatron's groups and leave the process group."""
        parallel.stop()
        super().close()


class _FlatLayout:
    """Megatron's tensors one after the other in one buffer that the ranks divide evenly.

    In Megatron's own layout, so that a slot's gradient is copied in as it is; it is taken apart
    into the checkpoint's tensors once an update.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, world_size: int, device: str) -> None:
        self._shapes = shapes
        self._device = device
        sizes = [shape.numel() for shape in shapes.values()]
        self._sizes = (*sizes, -sum(sizes) % world_size)

    def empty(self) -> torch.Tensor:
        """Return a float32 buffer; zero, because the padding at its end is added up too."""
        return torch.zeros(sum(self._sizes), dtype=torch.float32, device=self._device)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return Megatron's name -> view of `flat`."""
        *pieces, _ = flat.split(self._sizes)
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
