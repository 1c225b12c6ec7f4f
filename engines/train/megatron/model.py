"""Megatron's GPTModel on the shared ops, over one packed slot.

The modules, their fused parameters and their names are Megatron's own; a layer spec puts the parts
of `engines.train.megatron.layers` in. Invariant: for the same weights and slot the result is
bitwise that of every other trainer.

    model = build_model(spec.model, compute_dtype=torch.bfloat16, temperature=1.0)
    logprobs, entropy = model(slot)      # float32 [T] each
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from engines import numerics
from engines.train.head import scored_logprobs
from engines.train.megatron.layers import (
    MixtureOfExperts,
    PackedSelfAttention,
    QkvLinear,
    SharedSpecProvider,
    residual_add,
    slot_params,
)
from engines.train.recompute import recomputed
from engines.train.slots import PackedSlot
from model_specs.errors import EngineError, SpecError
from model_specs.model_spec import ModelSpec, MoeModelSpec, MoeSpec

EXACT_OPS = frozenset(
    {
        # views
        "aten._unsafe_view", "aten.detach", "aten.split", "aten.split_with_sizes", "aten.squeeze",
        "aten.unsqueeze", "aten.view",
        # allocation and copies
        "aten.clone", "aten.empty", "aten.new_zeros",
        # between the host, where slot and loss are, and the device
        "aten._to_copy",
        # the slot's description in integers
        "aten.cumsum", "aten.lift_fresh",
        # selection of rows, and zeros into padding
        "aten.index_select", "aten.index_copy_", "aten.masked_fill",
    }
)  # fmt: skip
"""Ops that may run outside of the shared ones: each gives the same bits in any batch."""


class SharedGptModel(GPTModel):
    """GPTModel whose forward takes a slot and returns log-probs and entropies of its tokens."""

    temperature: float

    def forward(self, slot: PackedSlot) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probs, entropies) of the slot's completion tokens, float32 [T] each."""
        head = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        slot = slot.to(head.device)
        logprobs, entropy = scored_logprobs(
            self.hidden(slot), head, slot, temperature=self.temperature
        )
        # The loss is computed on the host, where its sums are exactly rounded.
        return logprobs.cpu(), entropy.cpu()

    def hidden(self, slot: PackedSlot) -> torch.Tensor:
        """Return the hidden states [M, K] after the last norm."""
        embedded = numerics.embedding(slot.ids, self.embedding.word_embeddings.weight)
        hidden = self.decoder(
            hidden_states=embedded.masked_fill(slot.padding[:, None], 0)[:, None],
            attention_mask=None,
            packed_seq_params=slot_params(slot),
        )
        return hidden.view(len(slot.ids), -1)


class RecomputedLayer(TransformerLayer):
    """A layer that runs its forward again in backward.

    Megatron's own recomputation saves and restores the states of CUDA generators, which no op here
    draws from.
    """

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Return what the layer returns."""
        return recomputed(super().forward, hidden_states, **kwargs)


def transformer_config(spec: ModelSpec, *, compute_dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron's configuration of the architecture that `spec` describes.

    Raises:
        SpecError: A rope scaling, which the shared rotary op does not implement.
    """
    if spec.rope_scaling is not None:
        raise SpecError(
            f"model.rope_scaling={spec.rope_scaling} is not implemented by the shared rotary op; "
            "only the default (None) is"
        )
    experts = _expert_settings(spec.moe) if isinstance(spec, MoeModelSpec) else {}
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_key_value_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=spec.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # takes the activation from the layer spec
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deterministic_mode=True,
        params_dtype=compute_dtype,
        bf16=compute_dtype == torch.bfloat16,
        perform_initialization=False,
        # Made on the host and moved: Megatron leaves some parameters (a router's) there anyway.
        use_cpu_initialization=True,
        **experts,
    )
    # Read by the parts of the layer spec; Megatron has no such settings.
    config.rotary_base = spec.rope_theta
    if isinstance(spec, MoeModelSpec):
        config.normalize_expert_weights = spec.moe.normalize_weights
    return config


def _expert_settings(moe: MoeSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }


def block_spec(
    config: TransformerConfig, *, gradient_checkpointing: bool
) -> TransformerBlockSubmodules:
    """Return the layers of a decoder and its last norm, on the shared ops."""
    backend = SharedSpecProvider()
    norm = backend.layer_norm(rms_norm=True)
    qk_norm = norm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=QkvLinear,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    parts = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(),
        linear_fc2=backend.row_parallel_linear(),
        activation_func=backend.activation_func(),
    )
    mlp = ModuleSpec(module=MLP, submodules=parts)
    if config.num_moe_experts:
        experts = ModuleSpec(module=SequentialMLP, submodules=parts)
        mlp = ModuleSpec(module=MixtureOfExperts, submodules=MoESubmodules(experts=experts))
    layer = ModuleSpec(
        module=RecomputedLayer if gradient_checkpointing else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=residual_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=residual_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def build_model(
    spec: ModelSpec,
    *,
    compute_dtype: torch.dtype,
    temperature: float,
    gradient_checkpointing: bool = False,
    device: str = "cpu",
) -> SharedGptModel:
    """Return the model on `device`, with parameters that are allocated but not initialised.

    Megatron's parallel state must be there (`engines.train.megatron.parallel.start`).

    Raises:
        EngineError: Megatron's rotary frequencies are not the shared ones, byte for byte.
    """
    config = transformer_config(spec, compute_dtype=compute_dtype)
    check_frequencies(spec)
    model = SharedGptModel(
        config,
        block_spec(config, gradient_checkpointing=gradient_checkpointing),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        position_embedding_type="none",  # the core attention rotates by the shared op
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
    )
    model.temperature = temperature
    return model.to(device)


def check_frequencies(spec: ModelSpec) -> None:
    """Require that Megatron's own rotary embedding of this model has the shared frequencies.

    Raises:
        EngineError: A frequency differs; names the first with both values.
    """
    own = RotaryEmbedding(
        kv_channels=spec.head_dim,
        rotary_percent=1.0,
        rotary_base=spec.rope_theta,
        use_cpu_initialization=True,
    ).inv_freq
    shared = numerics.rotary_inv_freq(spec.rope_theta, spec.head_dim)
    different = (own.view(torch.int32) != shared.view(torch.int32)).nonzero().flatten().tolist()
    if own.shape != shared.shape or different:
        first = different[0] if different else 0
        raise EngineError(
            f"rope_theta={spec.rope_theta}: Megatron's rotary frequency {first} is "
            f"{float(own[first])!r}, the shared one {float(shared[first])!r}"
        )
