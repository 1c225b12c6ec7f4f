"""Megatron's fused tensors under the names and rows of the Hugging Face checkpoint, and back.

Invariant: the blocks of all tensors cover every element of both layouts exactly once, so a
conversion there and back is bitwise the identity, and a digest of fused storage is the digest of
the checkpoint's tensors. A tied head is an alias of the embedding and is no tensor.

    for block in logical_blocks(name, tensor, spec.model):
        block.rows.copy_(masters[block.name][block.row_offset :][: len(block.rows)])
    hf_state = megatron_to_hf(megatron_state, spec.model)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from model_specs.errors import EngineError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec, MoeModelSpec

WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Outside of the layers, the same in every family."""
_LAYER_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalBlock:
    """A run of rows of one checkpoint tensor, where Megatron stores it."""

    name: str
    """Hugging Face name."""
    row_offset: int
    """First row in the checkpoint's tensor."""
    rows: torch.Tensor
    """A view into Megatron's tensor; writing to it writes there."""


def logical_blocks(name: str, tensor: torch.Tensor, spec: ModelSpec) -> Iterator[LogicalBlock]:
    """Yield the blocks of one Megatron tensor.

    Args:
        name: Megatron's name, as in `GPTModel.named_parameters`.
        tensor: A parameter, a gradient or anything else of that layout.
        spec: Says how the fused rows are cut.

    Raises:
        EngineError: A name that has no logical one, or a number of rows that the spec does not
            imply.
    """
    if name in WHOLE:
        yield LogicalBlock(name=WHOLE[name], row_offset=0, rows=tensor)
        return
    match = _LAYER.fullmatch(name)
    if match is None:
        raise EngineError(f"{name} has no name in a {spec.family} checkpoint; extend {__name__}")
    prefix, inner = f"model.layers.{match[1]}.", match[2]
    if inner in _LAYER_WHOLE:
        yield LogicalBlock(name=prefix + _LAYER_WHOLE[inner], row_offset=0, rows=tensor)
        return
    expert = _EXPERT.fullmatch(inner)
    if expert is not None and isinstance(spec, MoeModelSpec):
        prefix += f"mlp.experts.{expert[1]}."
        if expert[2] == "2":
            yield LogicalBlock(name=prefix + "down_proj.weight", row_offset=0, rows=tensor)
        else:
            yield from gate_and_up(name, prefix, tensor, spec.moe.intermediate_size)
        return
    if inner == "mlp.linear_fc1.weight":
        yield from gate_and_up(name, prefix + "mlp.", tensor, spec.intermediate_size)
        return
    module, _, kind = inner.rpartition(".")
    if module != "self_attention.linear_qkv":
        raise EngineError(f"{name} has no name in a {spec.family} checkpoint; extend {__name__}")
    _check_rows(name, tensor, sum(count for *_, count in _qkv_rows(spec)))
    start = 0
    for part, row_offset, count in _qkv_rows(spec):
        yield LogicalBlock(
            name=f"{prefix}self_attn.{part}.{kind}",
            row_offset=row_offset,
            rows=tensor[start : start + count],
        )
        start += count


def gate_and_up(name: str, prefix: str, tensor: torch.Tensor, width: int) -> Iterator[LogicalBlock]:
    """Yield the two halves of a fused first projection of `width` rows each, gate first."""
    _check_rows(name, tensor, 2 * width)
    for part, rows in zip(("gate_proj", "up_proj"), tensor.split(width), strict=True):
        yield LogicalBlock(name=f"{prefix}{part}.weight", row_offset=0, rows=rows)


def _check_rows(name: str, tensor: torch.Tensor, wanted: int) -> None:
    if tensor.shape[0] != wanted:
        raise EngineError(
            f"{name} has {tensor.shape[0]} rows, but the spec implies {wanted}; check the sizes of "
            "model and spec"
        )


def _qkv_rows(spec: ModelSpec) -> Iterator[tuple[str, int, int]]:
    """Yield (projection, its first row, number of rows) in the order of the fused matrix."""
    queries = spec.num_attention_heads // spec.num_key_value_heads * spec.head_dim
    for group in range(spec.num_key_value_heads):
        yield "q_proj", group * queries, queries
        yield "k_proj", group * spec.head_dim, spec.head_dim
        yield "v_proj", group * spec.head_dim, spec.head_dim


def all_blocks(
    named_tensors: Iterable[tuple[str, torch.Tensor]], spec: ModelSpec
) -> list[LogicalBlock]:
    """Return the blocks of all tensors, and require that they cover the checkpoint exactly.

    Raises:
        EngineError: A row of a checkpoint tensor is missing or there twice, or has another shape.
    """
    blocks = [
        block for name, tensor in named_tensors for block in logical_blocks(name, tensor, spec)
    ]
    covered = by_name(blocks)
    wanted = parameter_shapes(spec)
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - covered.keys())]
    faults += [f"{name} is unknown" for name in sorted(covered.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & covered.keys()):
        found = joined_shape(covered[name])
        if found != wanted[name]:
            faults.append(f"{name} is {found}, the spec implies {wanted[name]}")
    if faults:
        raise EngineError(f"Megatron's tensors are not the model of the spec: {'; '.join(faults)}")
    return blocks


def by_name(blocks: Iterable[LogicalBlock]) -> dict[str, list[LogicalBlock]]:
    """Return name -> its blocks, first rows first; sorted by name."""
    found: dict[str, list[LogicalBlock]] = {}
    for block in sorted(blocks, key=lambda each: (each.name, each.row_offset)):
        found.setdefault(block.name, []).append(block)
    return found


def joined_shape(blocks: list[LogicalBlock]) -> tuple[int, ...] | None:
    """Return the shape of one name's blocks, first rows first; None at a gap or an overlap."""
    end = 0
    for block in blocks:
        if block.row_offset != end:
            return None
        end += block.rows.shape[0]
    return (end, *blocks[0].rows.shape[1:])


def megatron_to_hf(state: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return Hugging Face name -> tensor, sorted by name; a copy.

    Raises:
        EngineError: `state` is not the model of `spec`.
    """
    return {
        name: torch.cat([block.rows for block in blocks])
        for name, blocks in by_name(all_blocks(state.items(), spec)).items()
    }


def hf_to_megatron(
    state: Mapping[str, torch.Tensor], spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Return Megatron name -> tensor; a copy.

    Args:
        state: Hugging Face name -> tensor, exactly those that `spec` implies.
        spec: The model.
        shapes: Megatron name -> shape, as in `GPTModel.named_parameters`.

    Raises:
        EngineError: `shapes` is not the model of `spec`.
    """
    dtype = next(iter(state.values())).dtype
    fused = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    write_blocks(all_blocks(fused.items(), spec), state)
    return fused


@torch.no_grad()
def write_blocks(blocks: Iterable[LogicalBlock], state: Mapping[str, torch.Tensor]) -> None:
    """Write the checkpoint's tensors into Megatron's, rounding where the dtype is another one."""
    for block in blocks:
        block.rows.copy_(state[block.name][block.row_offset :][: len(block.rows)])
