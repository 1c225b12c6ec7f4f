"""GLM-MoE-DSA: Megatron's latent attention, sparse indexer and experts under checkpoint names.

Conversion only: no trainer runs this family. As in `engines.train.megatron.names` every element of
both layouts is covered exactly once, so a conversion there and back is bitwise the identity. The
indexer rotates the first channels of each head in the checkpoint and in Megatron-core 0.19, and the
last ones in 0.16, for which its rows are moved; experts are named one by one, as in checkpoint
files.

    hf_state = glm_to_hf(megatron_state, sizes)
    megatron_state = hf_to_glm(hf_state, sizes, shapes)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import megatron.core
import torch

from engines.train.megatron.names import (
    WHOLE,
    LogicalBlock,
    by_name,
    gate_and_up,
    joined_shape,
    write_blocks,
)
from model_specs.errors import EngineError

ROTATES_FIRST = tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 19)
"""Whether the installed Megatron rotates the first channels of an indexer head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmSizes:
    """What the rows of a GLM-MoE-DSA checkpoint are cut by."""

    intermediate_size: int
    """Of a dense layer."""
    expert_size: int
    """Of one routed expert."""
    shared_size: int
    """Of the shared experts together."""
    index_heads: int
    index_head_dim: int
    rope_dim: int
    """Channels of an indexer head that are rotated."""


_LAYER_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.core_attention.indexer.linear_weights_proj.weight": (
        "self_attn.indexer.weights_proj.weight"
    ),
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
_INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def glm_blocks(name: str, tensor: torch.Tensor, sizes: GlmSizes) -> Iterator[LogicalBlock]:
    """Yield the blocks of one Megatron tensor; buffers such as the router's bias count as tensors.

    Raises:
        EngineError: A name that has no logical one, or a number of rows that the sizes do not
            imply.
    """
    if name in WHOLE:
        yield LogicalBlock(name=WHOLE[name], row_offset=0, rows=tensor)
        return
    match = _LAYER.fullmatch(name)
    inner = match[2] if match else ""
    prefix = f"model.layers.{match[1]}." if match else ""
    expert = _EXPERT.fullmatch(inner)
    indexed = inner.removeprefix("self_attention.core_attention.indexer.")
    if inner in _LAYER_WHOLE:
        yield LogicalBlock(name=prefix + _LAYER_WHOLE[inner], row_offset=0, rows=tensor)
    elif expert is not None:
        prefix += f"mlp.experts.{expert[1]}."
        if expert[2] == "2":
            yield LogicalBlock(name=prefix + "down_proj.weight", row_offset=0, rows=tensor)
        else:
            yield from gate_and_up(name, prefix, tensor, sizes.expert_size)
    elif inner == "mlp.linear_fc1.weight":
        yield from gate_and_up(name, prefix + "mlp.", tensor, sizes.intermediate_size)
    elif inner == "mlp.shared_experts.linear_fc1.weight":
        yield from gate_and_up(name, prefix + "mlp.shared_experts.", tensor, sizes.shared_size)
    elif indexed in _INDEXER and indexed != inner:
        heads = sizes.index_heads if indexed == "linear_wq_b.weight" else 1
        yield from _indexer_rows(
            f"{prefix}self_attn.indexer.{_INDEXER[indexed]}", tensor, heads, sizes
        )
    else:
        raise EngineError(f"{name} has no name in a GLM-MoE-DSA checkpoint; extend {__name__}")


def _indexer_rows(
    name: str, tensor: torch.Tensor, heads: int, sizes: GlmSizes
) -> Iterator[LogicalBlock]:
    """Yield the rows in Megatron's order: 0.16 has those of a head that are not rotated first."""
    width, rope = sizes.index_head_dim, sizes.rope_dim
    if tensor.shape[0] != heads * width:
        raise EngineError(
            f"{name} has {tensor.shape[0]} rows, but {heads} indexer heads of {width} have "
            f"{heads * width}"
        )
    if ROTATES_FIRST:
        yield LogicalBlock(name=name, row_offset=0, rows=tensor)
        return
    for head in range(heads):
        first, split = head * width, (head + 1) * width - rope
        yield LogicalBlock(name=name, row_offset=first + rope, rows=tensor[first:split])
        yield LogicalBlock(name=name, row_offset=first, rows=tensor[split : split + rope])


def glm_to_hf(state: Mapping[str, torch.Tensor], sizes: GlmSizes) -> dict[str, torch.Tensor]:
    """Return checkpoint name -> tensor, sorted by name; a copy.

    Raises:
        EngineError: Rows of a checkpoint tensor are missing or there twice.
    """
    whole = {}
    for name, blocks in _grouped(state, sizes).items():
        if joined_shape(blocks) is None:
            raise EngineError(f"{name}: Megatron's rows do not cover it exactly once")
        whole[name] = torch.cat([block.rows for block in blocks])
    return whole


def hf_to_glm(
    state: Mapping[str, torch.Tensor], sizes: GlmSizes, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Return Megatron name -> tensor; a copy.

    Args:
        state: Checkpoint name -> tensor.
        sizes: How fused rows are cut.
        shapes: Megatron name -> shape of every parameter, and of the routers' biases.

    Raises:
        EngineError: A tensor of the checkpoint has no place in Megatron, or the other way round.
    """
    fused = {
        name: torch.empty(shape, dtype=_dtype_of(name, shape, state, sizes))
        for name, shape in shapes.items()
    }
    blocks = _grouped(fused, sizes)
    if blocks.keys() != state.keys():
        missing, unknown = (
            sorted(blocks.keys() - state.keys()),
            sorted(state.keys() - blocks.keys()),
        )
        raise EngineError(f"the checkpoint lacks {missing[:3]} and has {unknown[:3]} beside")
    for name, parts in blocks.items():
        if joined_shape(parts) != tuple(state[name].shape):
            raise EngineError(
                f"{name} is {tuple(state[name].shape)}, Megatron has {joined_shape(parts)}"
            )
        write_blocks(parts, state)
    return fused


def _dtype_of(
    name: str, shape: tuple[int, ...], state: Mapping[str, torch.Tensor], sizes: GlmSizes
) -> torch.dtype:
    """A router's bias stays float32 beside bfloat16 weights."""
    first = next(glm_blocks(name, torch.empty(shape, device="meta"), sizes))
    if first.name not in state:
        raise EngineError(f"the checkpoint lacks {first.name}, which Megatron keeps in {name}")
    return state[first.name].dtype


def _grouped(state: Mapping[str, torch.Tensor], sizes: GlmSizes) -> dict[str, list[LogicalBlock]]:
    return by_name(
        block for name, tensor in state.items() for block in glm_blocks(name, tensor, sizes)
    )
