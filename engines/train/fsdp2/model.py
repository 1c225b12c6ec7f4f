"""A transformers causal LM whose forward runs on the shared ops, over one packed slot.

The classes, parameters and state-dict names stay transformers' own; only `forward` of the
instances is replaced, so that FSDP2's hooks on layers and root work as ever. Invariant: every op
that rounds is one of `engines.numerics`; what runs beside them moves or reshapes values exactly,
and an audit over a real forward proves that (`engines.gates.audit`).

    model = build_model(spec.model)
    share_forward(model, spec.model, temperature=spec.sampling.temperature)
    logprobs, entropy = model(slot)      # float32 [T] each, T = slot.num_tokens
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines import numerics
from engines.train.head import scored_logprobs
from engines.train.recompute import recomputed
from engines.train.slots import PackedSlot
from model_specs.errors import SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec, MoeModelSpec

EXACT_OPS = frozenset(
    {
        # views
        "aten.as_strided", "aten.detach", "aten.split_with_sizes", "aten.unsqueeze", "aten.view",
        # allocation and copies; `_to_copy` and `copy_` cast the masters to the compute dtype
        "aten.empty", "aten.new_zeros", "aten.clone", "aten.copy_", "aten._foreach_copy_",
        "aten._to_copy",
        # selection of rows, and zeros into padding
        "aten.index_select", "aten.index_copy_", "aten.masked_fill",
        # FSDP2's gathering of parameters, and markers around it
        "fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "c10d._allgather_base_",
        "profiler._record_function_enter_new", "profiler._record_function_exit",
    }
)  # fmt: skip
"""Ops that may run outside of the shared ones: each gives the same bits in any batch."""


def model_config(spec: ModelSpec) -> Any:
    """Return transformers' configuration of the architecture that `spec` describes.

    Raises:
        SpecError: A rope scaling, which the shared rotary op does not implement.
    """
    if spec.rope_scaling is not None:
        raise SpecError(
            f"model.rope_scaling={spec.rope_scaling} is not implemented by the shared rotary op; "
            "only the default (None) is"
        )
    family_facts: dict[str, Any] = {}
    if spec.family == "llama":
        family_facts = {"attention_bias": spec.qkv_bias}
    if isinstance(spec, MoeModelSpec):
        family_facts = {
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "moe_intermediate_size": spec.moe.intermediate_size,
            "norm_topk_prob": spec.moe.normalize_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return AutoConfig.for_model(
        spec.family,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_word_embeddings,
        hidden_act="silu",
        **family_facts,
    )


def build_model(spec: ModelSpec, *, device: str = "cpu") -> torch.nn.Module:
    """Return the model with float32 parameters that are allocated but not initialised.

    Args:
        spec: The architecture.
        device: Where the parameters lie.

    Raises:
        SpecError: Names or shapes of its parameters are not those the spec implies.
    """
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            model_config(spec), dtype=torch.float32
        )
        if isinstance(spec, MoeModelSpec):
            for layer in model.model.layers:
                layer.mlp.experts = _experts(spec)
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` gave the tied head storage of its own
    del model.model.rotary_emb  # the shared rotary op has its own frequencies
    built = {name: tuple(value.shape) for name, value in model.named_parameters()}
    wanted = parameter_shapes(spec)
    for name in sorted(built.keys() | wanted.keys()):
        if built.get(name) != wanted.get(name):
            raise SpecError(
                f"{name}: the model spec implies shape {wanted.get(name)}, transformers' "
                f"{type(model).__name__} has {built.get(name)}; check model.qkv_bias, "
                "model.tie_word_embeddings and the sizes"
            )
    return model


def _experts(spec: MoeModelSpec) -> torch.nn.ModuleList:
    """Return the experts one by one, as the checkpoint's files name them.

    transformers stacks them in one tensor, whose rows would be experts: ranks could not share one.
    """
    hidden, inner = spec.hidden_size, spec.moe.intermediate_size
    sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return torch.nn.ModuleList(
        torch.nn.ModuleDict(
            {name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()}
        )
        for _ in range(spec.moe.num_experts)
    )


def share_forward(
    model: torch.nn.Module,
    spec: ModelSpec,
    *,
    temperature: float,
    gradient_checkpointing: bool = False,
) -> None:
    """Replace the forwards of `model` and its parts, in place.

    Afterwards `model(slot)` returns (log-probs, entropy), float32 [T] each: of the completion
    tokens of all sequences in order, under softmax(logits / temperature).
    """
    # Made on the host and moved: a power need not be the same on another device.
    inv_freq = numerics.rotary_inv_freq(spec.rope_theta, spec.head_dim).to(
        model.lm_head.weight.device
    )
    for layer in model.model.layers:
        _replace(layer, _recomputed_layer_forward if gradient_checkpointing else _layer_forward)
        _replace(layer.self_attn, _attention_forward(spec, inv_freq))
        _replace(layer.mlp, _moe_forward(spec) if isinstance(spec, MoeModelSpec) else _mlp_forward)
        _replace(layer.input_layernorm, _norm_forward)
        _replace(layer.post_attention_layernorm, _norm_forward)
        if spec.qk_norm:
            _replace(layer.self_attn.q_norm, _head_norm_forward)
            _replace(layer.self_attn.k_norm, _head_norm_forward)
    _replace(model.model, _decoder_forward)
    _replace(model.model.embed_tokens, _embedding_forward)
    _replace(model.model.norm, _norm_forward)
    _replace(model, _causal_lm_forward(temperature))


def _replace(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)


def _norm_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return numerics.rms_norm(hidden, self.weight, self.variance_epsilon)


def _head_norm_forward(self: Any, heads: torch.Tensor) -> torch.Tensor:
    """[M, heads, head_dim]: each head of each row by itself."""
    return _norm_forward(self, heads.reshape(-1, heads.shape[-1])).view(heads.shape)


def _embedding_forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
    return numerics.embedding(ids, self.weight)


def _mlp_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = numerics.linear_multi(
        hidden,
        (self.gate_proj.weight, self.up_proj.weight),
        (self.gate_proj.bias, self.up_proj.bias),
    )
    down = self.down_proj
    return numerics.linear(numerics.silu_mul(gate, up), down.weight, down.bias)


def _moe_forward(spec: MoeModelSpec) -> Callable[..., Any]:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        weights, experts = numerics.route(
            numerics.linear(hidden, self.gate.weight),
            top_k=spec.moe.experts_per_token,
            normalise=spec.moe.normalize_weights,
        )
        gate, up, down = (
            [expert[name].weight for expert in self.experts]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        return numerics.expert_mlp(hidden, experts, weights, gate, up, down)

    return forward


def _attention_forward(spec: ModelSpec, inv_freq: torch.Tensor) -> Callable[..., Any]:
    heads, kv_heads, width = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim

    def forward(self: Any, hidden: torch.Tensor, slot: PackedSlot) -> torch.Tensor:
        q, k, v = numerics.linear_multi(
            hidden,
            (self.q_proj.weight, self.k_proj.weight, self.v_proj.weight),
            (self.q_proj.bias, self.k_proj.bias, self.v_proj.bias),
        )
        rows = hidden.shape[0]
        q, k = q.view(rows, heads, width), k.view(rows, kv_heads, width)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = numerics.causal_attention(
            numerics.rotary(q, slot.positions, inv_freq),
            numerics.rotary(k, slot.positions, inv_freq),
            v.view(rows, kv_heads, width),
            starts=slot.starts,
            lengths=slot.lengths,
            scale=width**-0.5,
        )
        output = self.o_proj
        return numerics.linear(mixed.reshape(rows, heads * width), output.weight, output.bias)

    return forward


def _layer_forward(self: Any, hidden: torch.Tensor, slot: PackedSlot) -> torch.Tensor:
    hidden = numerics.add(hidden, self.self_attn(self.input_layernorm(hidden), slot))
    return numerics.add(hidden, self.mlp(self.post_attention_layernorm(hidden)))


def _recomputed_layer_forward(self: Any, hidden: torch.Tensor, slot: PackedSlot) -> torch.Tensor:
    # Inside of FSDP2's hooks, which gather the layer's weights again before its backward.
    return recomputed(_layer_forward, self, hidden, slot)


def _decoder_forward(self: Any, slot: PackedSlot) -> torch.Tensor:
    hidden = self.embed_tokens(slot.ids).masked_fill(slot.padding[:, None], 0)
    for layer in self.layers:
        hidden = layer(hidden, slot)
    return self.norm(hidden)


def _causal_lm_forward(temperature: float) -> Callable[..., Any]:
    def forward(self: Any, slot: PackedSlot) -> tuple[torch.Tensor, torch.Tensor]:
        slot = slot.to(self.lm_head.weight.device)
        logprobs, entropy = scored_logprobs(
            self.model(slot), self.lm_head.weight, slot, temperature=temperature
        )
        # The loss is computed on the host, where its sums are exactly rounded.
        return logprobs.cpu(), entropy.cpu()

    return forward
