"""What a trainer does to live values for the record: flip one bit on purpose, keep tensors.

Invariant: a flip hits the storage that training goes on with, on the rank that owns the element;
kept tensors are whole, whatever the number of ranks, and are written by rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from engines.contracts import Flip
from engines.faults import choose_name, flip_bit
from engines.train.shards import Shard, gathered
from model_specs.errors import SpecError


def flip_shard(shards: Mapping[str, Shard], flip: Flip) -> None:
    """Flip one bit of one element in place; `flip.element` counts in the whole tensor, row-major.

    Raises:
        SpecError: There is no such tensor, element or bit.
    """
    name = choose_name(shards, flip)
    shard = shards[name]
    if not 0 <= flip.element < math.prod(shard.shape):
        raise SpecError(
            f"flip: element {flip.element} is outside of {name}, whose shape is {shard.shape}"
        )
    first = shard.row_offset * math.prod(shard.shape[1:])
    if first <= flip.element < first + shard.local.numel():
        flip_bit(shard.local, flip.element - first, flip.bit)


def keep_shards(folder: str | None, probe: str, shards: Mapping[str, Shard]) -> None:
    """Write the whole tensors as `<folder>/<probe>.safetensors`, or nothing; a collective."""
    if folder is None:
        return
    whole = {}
    for name, shard in shards.items():
        tensor = gathered(shard)
        if dist.get_rank() == 0:
            whole[name] = tensor
    if dist.get_rank() == 0:
        keep_tensors(folder, probe, whole)


def keep_tensors(folder: str, probe: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `<folder>/<probe>.safetensors` on this rank."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Shards may be views of one communication buffer, which the format does not allow.
    owned = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(owned, Path(folder) / f"{probe}.safetensors")
