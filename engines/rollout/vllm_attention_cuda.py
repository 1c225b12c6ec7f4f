"""vLLM's paged KV cache on CUDA, read by the shared causal attention.

Invariant: the result for a query row depends on that row and on keys and values up to its position,
and on nothing else: not on pages, on the batch, on prefill, prefix hit or decode, or on whether a
CUDA graph replays it. That is a property of `numerics.cuda.attend_pages`; this module only says
where the rows are. vLLM's own kernel still writes keys and values to their slots, which is a copy.

Page layout: `[pages, key-value heads, page size, 2 * head_dim]` in either stride order, keys before
values.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
)

from engines.numerics.cuda import attend_pages
from model_specs.errors import UnsupportedError


class SharedAttentionImpl(TritonAttentionImpl):
    """Causal decoder attention, without any of the variants that the shared op does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        variants = {
            "alibi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
            "a soft cap of logits": self.logits_soft_cap != 0,
            "attention sinks": self.sinks is not None,
            f"a KV cache of dtype {self.kv_cache_dtype}": self.kv_cache_dtype
            not in ("auto", "bfloat16", "float16"),
            f"attention type {self.attn_type}": self.attn_type != "decoder",
            "a KV cache shared between layers": self.kv_sharing_target_layer_name is not None,
            "a look-back over chunks": self.chunk_lookback != -1,
        }
        present = [name for name, is_present in variants.items() if is_present]
        if present:
            raise UnsupportedError(
                f"the model asks for {', '.join(present)}; the shared attention is plain causal"
            )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend for all requests of the batch; `query` and `output` are [tokens, heads, head_dim].

        Raises:
            UnsupportedError: The output is to be quantised, or the batch is not causal.
        """
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        if (
            output_scale is not None
            or output_block_scale is not None
            or attn_metadata.causal is not True
        ):
            raise UnsupportedError("the shared attention is causal and writes in the compute dtype")
        tokens = attn_metadata.num_actual_tokens
        shape = (-1, self.num_heads, self.head_size)
        attend_pages(
            query[:tokens].view(shape),
            kv_cache[..., : self.head_size],
            kv_cache[..., self.head_size :],
            attn_metadata.block_table,
            query_starts=attn_metadata.query_start_loc,
            lengths=attn_metadata.seq_lens,
            max_query_length=attn_metadata.max_query_len,
            scale=self.scale,
            out=output[:tokens].view(shape),
        )
        return output


class SharedAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend with the shared attention in it."""

    @staticmethod
    def get_impl_cls() -> type[SharedAttentionImpl]:
        """Return the implementation that vLLM makes for each layer."""
        return SharedAttentionImpl
