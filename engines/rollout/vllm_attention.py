"""vLLM's paged KV cache, read and written for the shared causal attention.

Invariant: the result for a query row depends on that row and on keys and values up to its position,
and on nothing else: not on pages, on the batch, or on whether the row came by prefill, after a
prefix hit or by decode. That is a property of `numerics.paged_attention_batch`; this module only
says where the rows are.

Page layout: [pages, key-value heads, page size, 2 * head_dim], keys before values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from engines import numerics
from model_specs.errors import UnsupportedError


class SharedAttentionImpl(CPUAttentionBackendImpl):
    """Causal decoder attention, without any of the variants that the shared op does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        variants = {
            "alibi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "a soft cap of logits": self.logits_soft_cap != 0,
            "attention sinks": self.sinks is not None,
            "a quantised KV cache": self.is_fp8_kv_cache,
            f"attention type {self.attn_type}": self.attn_type != "decoder",
            "a KV cache shared between layers": self.kv_sharing_target_layer_name is not None,
        }
        present = [name for name, is_present in variants.items() if is_present]
        if present:
            raise UnsupportedError(
                f"the model asks for {', '.join(present)}; the shared attention is plain causal"
            )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values ([tokens, key-value heads, head_dim]) to their slots."""
        page_size = kv_cache.shape[2]
        count = slot_mapping.shape[0]
        pages, offsets = slot_mapping // page_size, slot_mapping % page_size
        kv_cache[pages, :, offsets, : self.head_size] = key[:count]
        kv_cache[pages, :, offsets, self.head_size :] = value[:count]

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend for all requests of the batch; `query` and `output` are [tokens, heads, head_dim].

        Raises:
            UnsupportedError: The output is to be quantised, or the batch is not causal.
        """
        if attn_metadata is None:
            return output
        if output_scale is not None or output_block_scale is not None or not attn_metadata.causal:
            raise UnsupportedError("the shared attention is causal and writes in the compute dtype")
        starts = attn_metadata.query_start_loc.tolist()
        attended = numerics.paged_attention_batch(
            query,
            kv_cache[..., : self.head_size],
            kv_cache[..., self.head_size :],
            attn_metadata.block_table,
            query_lengths=[last - first for first, last in pairwise(starts)],
            lengths=attn_metadata.seq_lens.tolist(),
            scale=self.scale,
        )
        output.copy_(attended.view_as(output))
        return output


class SharedAttentionBackend(CPUAttentionBackend):
    """The CPU backend with the shared attention in it."""

    @staticmethod
    def get_impl_cls() -> type[SharedAttentionImpl]:
        """Return the implementation that vLLM makes for each layer."""
        return SharedAttentionImpl
