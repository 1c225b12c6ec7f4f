"""Logical weight names, and where an engine that fuses matrices keeps them.

A weight has one name and one layout in every engine: those of the Hugging Face checkpoint. vLLM
stores q, k and v as rows of one `qkv_proj`, gate and up as rows of one `gate_up_proj`, and pads the
vocabulary. `logical_views` yields views into that storage under the logical names, so that a digest
of what an engine really holds can be compared, tensor by tensor, with the digest of what was sent.

Invariant: the views cover every stored element exactly once, except vocabulary padding. A tied
output head is not a tensor of its own but an alias (`tied_aliases`), counted once under the
embedding's name.

    facts = facts_of(config)
    for name, view in logical_views(model.named_parameters(), facts):
        digests[name] = digest_tensor(name, view)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_specs.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the shapes of a Qwen2, Qwen3 or Llama checkpoint follow from."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention's output projection (Llama's `attention_bias`)."""
    mlp_bias: bool
    qk_norm: bool = False
    """Norm of every query and key head (Qwen3)."""
    num_experts: int = 0
    """Experts of each layer; 0 for a dense MLP."""
    expert_size: int = 0
    """Intermediate size of one expert."""

    @property
    def query_rows(self) -> int:
        """Rows of `q_proj`."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_rows(self) -> int:
        """Rows of `k_proj`, and of `v_proj`."""
        return self.num_key_value_heads * self.head_dim


def facts_of(config: Any) -> ModelFacts:
    """Return the facts of a transformers config of type qwen2, qwen3, qwen3_moe or llama.

    Raises:
        UnsupportedError: The model type is another one.
    """
    model_type = config.model_type
    if model_type not in ("qwen2", "qwen3", "qwen3_moe", "llama"):
        raise UnsupportedError(
            f"model type {model_type!r} has no map of logical weight names; known: llama, qwen2, "
            "qwen3, qwen3_moe"
        )
    is_moe = model_type == "qwen3_moe"
    # In both families the setting is of all four projections of the attention.
    attention_bias = model_type != "qwen2" and bool(config.attention_bias)
    return ModelFacts(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and bool(config.mlp_bias),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        num_experts=config.num_experts if is_moe else 0,
        expert_size=config.moe_intermediate_size if is_moe else 0,
    )


def expected_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Return logical name -> shape of all tensors of a full push; a tied head is not one."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (facts.query_rows, hidden, facts.qkv_bias),
        "self_attn.k_proj": (facts.key_value_rows, hidden, facts.qkv_bias),
        "self_attn.v_proj": (facts.key_value_rows, hidden, facts.qkv_bias),
        "self_attn.o_proj": (hidden, facts.query_rows, facts.output_bias),
    }
    mlps = {"mlp": inner}
    if facts.num_experts:
        linears["mlp.gate"] = (facts.num_experts, hidden, False)
        mlps = {f"mlp.experts.{e}": facts.expert_size for e in range(facts.num_experts)}
    for mlp, width in mlps.items():
        linears |= {
            f"{mlp}.gate_proj": (width, hidden, facts.mlp_bias),
            f"{mlp}.up_proj": (width, hidden, facts.mlp_bias),
            f"{mlp}.down_proj": (hidden, width, facts.mlp_bias),
        }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (facts.vocab_size, hidden)}
    for layer in range(facts.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if facts.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (facts.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (facts.head_dim,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not facts.tie_word_embeddings:
        shapes[HEAD] = (facts.vocab_size, hidden)
    return shapes


def tied_aliases(facts: ModelFacts) -> dict[str, str]:
    """Return alias -> the logical name that holds its values."""
    return {HEAD: EMBEDDING} if facts.tie_word_embeddings else {}


def logical_views(
    named_parameters: Iterable[tuple[str, torch.Tensor]], facts: ModelFacts
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (logical name, view) over an engine's parameters, in the order they are stored.

    Args:
        named_parameters: (name, tensor) pairs of vLLM's model, or of any model that uses the
            logical names as they are; a tied head may be there or not, and is skipped.
        facts: Sizes of the fused rows and of the vocabulary without padding.

    Yields:
        Views that share the storage of the parameters: writing to one writes to the engine.

    Raises:
        EngineError: A fused matrix does not have the rows that the facts ask for.
    """
    query, key_value, inner = facts.query_rows, facts.key_value_rows, facts.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)),
        "gate_up_proj": (("gate_proj", inner), ("up_proj", inner)),
    }
    for name, tensor in named_parameters:
        if name == HEAD and facts.tie_word_embeddings:
            continue
        if name in (EMBEDDING, HEAD):
            yield name, tensor.detach()[: facts.vocab_size]
            continue
        if name.endswith((".w13_weight", ".w2_weight")):
            yield from _expert_views(name, tensor.detach(), facts)
            continue
        parent, _, kind = name.rpartition(".")
        module_path, _, module = parent.rpartition(".")
        if module not in fused:
            yield name, tensor.detach()
            continue
        rows = sum(count for _, count in fused[module])
        if tensor.shape[0] != rows:
            raise EngineError(
                f"{name} has {tensor.shape[0]} rows but the config asks for {rows}; the engine "
                "packs or "
                "shards this matrix, so that what it holds cannot be read back under logical names"
            )
        start = 0
        for logical, count in fused[module]:
            yield f"{module_path}.{logical}.{kind}", tensor.detach()[start : start + count]
            start += count


def _expert_views(
    name: str, stacked: torch.Tensor, facts: ModelFacts
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of each expert of vLLM's `w13_weight` (gate, up) or `w2_weight` (down)."""
    width, fused = facts.expert_size, name.endswith(".w13_weight")
    wanted = (2 * width, facts.hidden_size) if fused else (facts.hidden_size, width)
    if tuple(stacked.shape) != (facts.num_experts, *wanted):
        raise EngineError(
            f"{name} is {tuple(stacked.shape)} but the config asks for "
            f"{(facts.num_experts, *wanted)}; the engine packs or pads its experts, so that what "
            "it holds cannot be read back under logical names"
        )
    prefix = name.partition(".experts.")[0]
    for expert, matrix in enumerate(stacked.unbind(0)):
        parts = (
            (("gate_proj", matrix[:width]), ("up_proj", matrix[width:]))
            if fused
            else (("down_proj", matrix),)
        )
        for part, view in parts:
            yield f"{prefix}.experts.{expert}.{part}.weight", view


def check_complete(
    arrived: Iterable[tuple[str, tuple[int, ...]]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Require that every expected tensor arrived exactly once, with its shape, and nothing else.

    Raises:
        EngineError: Names all tensors that are missing, unknown, there twice, or of another shape.
    """
    seen: dict[str, tuple[int, ...]] = {}
    twice, reshaped = [], []
    for name, shape in arrived:
        if name in seen:
            twice.append(name)
        seen[name] = shape
        if name in expected and shape != expected[name]:
            reshaped.append(f"{name} {shape} instead of {expected[name]}")
    faults = {
        "missing": sorted(set(expected) - set(seen)),
        "unknown": sorted(set(seen) - set(expected)),
        "there twice": sorted(set(twice)),
        "of another shape": sorted(reshaped),
    }
    found = [f"{what}: {', '.join(names)}" for what, names in faults.items() if names]
    if found:
        raise EngineError(
            f"a full set of weights is {len(expected)} tensors, {len(seen)} arrived; "
            f"{'; '.join(found)}. Nothing was loaded; send all tensors under their checkpoint names"
        )
