"""Megatron's layer parts on the shared ops, put in by a layer spec: nothing of Megatron is patched.

Each class is Megatron's own with another `forward`, so parameters, fused storage and state-dict
names stay Megatron's. Invariant: an op here is called with the same tensors as in every other
trainer. Fused matrices are taken apart into the checkpoint's matrices first, because a gradient
through several matrices has one definition (`numerics.linear_multi`), and their products stay
apart: put together they would be copied there and back, each way. Rows of weights are moved by
`split` only, whose gradient moves rows back and adds nothing.

    backend = SharedSpecProvider()
    linear_class = backend.column_parallel_linear()

Hidden states are [M, 1, K]: Megatron's (sequence, batch, hidden) with all rows of a packed slot in
the sequence dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer

from engines import numerics
from engines.train.slots import PackedSlot


@dataclass
class SlotParams(PackedSeqParams):
    """Megatron's description of a packed batch, with the slot that it describes."""

    slot: PackedSlot | None = None


def slot_params(slot: PackedSlot) -> SlotParams:
    """Describe a slot in Megatron's words: cumulative lengths, and where padded sequences start."""
    lengths = torch.tensor((0, *slot.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    starts = torch.tensor((*slot.starts, len(slot.ids)), dtype=torch.int32)
    longest = max(slot.lengths)
    return SlotParams(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        slot=slot,
    )


class SharedRmsNorm(torch.nn.Module):
    """RMSNorm over the last dimension of any number of them."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm of each row, in the shape of `hidden`."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return numerics.rms_norm(rows, self.weight, self.eps).view(hidden.shape)


class QkvLinear(ColumnParallelLinear):
    """The fused query, key and value projection.

    Its rows are interleaved by key-value group: the queries of group 0, its key, its value, the
    queries of group 1, and so on.
    """

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Return query, key and value, each [M, heads * head_dim] of its own heads in order."""
        groups, width = self.config.num_query_groups, self.config.kv_channels
        sizes = (self.config.num_attention_heads // groups * width, width, width)
        weights = _taken_apart(self.weight, groups, sizes)
        biases: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.bias is not None:
            biases = _taken_apart(self.bias, groups, sizes)
        return numerics.linear_multi(hidden.flatten(0, 1), weights, biases)


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention with query, key and value as they come out of their products."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Return query, key and value, each [M, 1, heads, head_dim], after their norms."""
        assert key_value_states is None
        assert split_qkv
        assert not output_gate
        query, key, value = (
            rows.view(*hidden_states.shape[:2], -1, self.config.kv_channels)
            for rows in self.linear_qkv(hidden_states)
        )
        if self.config.qk_layernorm:  # without them megatron-core 0.19 has None, 0.16 an identity
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


class GatedLinear(ColumnParallelLinear):
    """The fused gate and up projection: gate rows first."""

    def forward(
        self, hidden: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        """Return ((gate, up), None), both [M, inner]; Megatron hands them on to `SwiGlu`."""
        rows = hidden.flatten(0, 1)
        return numerics.linear_multi(rows, self.weight.chunk(2), (None, None)), None


class RowLinear(RowParallelLinear):
    """A projection back to the hidden size."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ([M, 1, K], None)."""
        rows = hidden.shape[0]
        return numerics.linear(hidden.reshape(rows, -1), self.weight).view(rows, 1, -1), None


def _taken_apart(
    fused: torch.Tensor, groups: int, sizes: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the checkpoint's tensors of a fused one with `sizes` rows of each in every group."""
    parts = fused.view(groups, sum(sizes), *fused.shape[1:]).split(sizes, dim=1)
    return tuple(part.reshape(-1, *fused.shape[1:]) for part in parts)


class SwiGlu(torch.nn.Module):
    """silu(gate) * up of the two that `GatedLinear` returns."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_and_up: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return [M, 1, inner]."""
        gate, up = gate_and_up
        return numerics.silu_mul(gate, up)[:, None]


class MixtureOfExperts(MoELayer):
    """Megatron's router and experts, with routing, dispatch and combination in the shared ops.

    All experts are on every rank, so that nothing is dispatched over ranks.
    """

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Return ([M, 1, K], None)."""
        rows = hidden.view(hidden.shape[0], -1)
        weights, experts = numerics.route(
            numerics.linear(rows, self.router.weight),
            top_k=self.config.moe_router_topk,
            normalise=self.config.normalize_expert_weights,
        )
        mlps = self.experts.local_experts
        halves = [mlp.linear_fc1.weight.chunk(2) for mlp in mlps]
        output = numerics.expert_mlp(
            rows,
            experts,
            weights,
            [gate for gate, _ in halves],
            [up for _, up in halves],
            [mlp.linear_fc2.weight for mlp in mlps],
        )
        return output.view(hidden.shape), None


class CoreAttention(MegatronModule):
    """Rotary embedding and causal attention within each sequence of the slot."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        # Made on the host and moved with the model: a power need not be the same elsewhere.
        self.register_buffer(
            "inv_freq",
            numerics.rotary_inv_freq(config.rotary_base, config.kv_channels),
            persistent=False,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: SlotParams,
        **_: Any,
    ) -> torch.Tensor:
        """Return [M, heads * head_dim].

        Args:
            query: [M, heads, head_dim], before rotation.
            key: [M, key-value heads, head_dim].
            value: Like `key`.
            attention_mask: None; the slot says what a row may see.
            packed_seq_params: Of `slot_params`.
        """
        slot = packed_seq_params.slot
        assert slot is not None
        mixed = numerics.causal_attention(
            numerics.rotary(query, slot.positions, self.inv_freq),
            numerics.rotary(key, slot.positions, self.inv_freq),
            value,
            starts=slot.starts,
            lengths=slot.lengths,
            scale=self.config.kv_channels**-0.5,
        )
        return mixed.reshape(mixed.shape[0], -1)


def residual_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Stand for Megatron's `get_bias_dropout_add`: no bias, no dropout, one shared addition."""

    def added(
        output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        output, bias = output_with_bias
        assert bias is None
        assert dropout == 0.0
        return numerics.add(residual, output)

    return added


class SharedSpecProvider(LocalSpecProvider):
    """Megatron's local backend with the shared ops in it."""

    def column_parallel_linear(self) -> type:
        """The only column-parallel matrix of a dense layer beside qkv: gate and up."""
        return GatedLinear

    def row_parallel_linear(self) -> type:
        """Projections back to the hidden size."""
        return RowLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """RMSNorm everywhere."""
        return SharedRmsNorm

    def core_attention(self) -> type:
        """Causal attention with its rotary embedding."""
        return CoreAttention

    def activation_func(self) -> type:
        """The gated activation of the two outputs of gate and up."""
        return SwiGlu
