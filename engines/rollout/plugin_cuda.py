"""The shared ops under vLLM's own model classes, for CUDA; installed by `engines.rollout.plugin`.

| in vLLM | replaced by |
| --- | --- |
| `RMSNorm` (with residual: the sum is rounded, then normed) | `add_rms_norm`, `rms_norm` |
| `SiluAndMul` | `silu_mul` |
| `RotaryEmbedding` | `rotary` |
| `default_unquantized_gemm`: linears and the output head | `linear` |
| `AttentionBackendEnum.TRITON_ATTN` | `attend_pages` (`engines.rollout.vllm_attention_cuda`) |
| `FusedTopKRouter._compute_routing` | `route` |
| `UnquantizedFusedMoEMethod`: experts as its Triton back end stores them | `mix_experts` |
| `gpu.sample.Sampler`: logits in float32, temperature, log-probs | `temper_`, `token_logprobs` |

Invariant: all of them can be captured in a CUDA graph: no copy to the host, no size read from the
device. vLLM keeps its draw, whose noise is a function of a request's seed and position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.rollout.plugin import hook
from model_specs.errors import UnsupportedError


def install() -> list[str]:
    """Put the shared ops in; return what was replaced, as `vLLM's name -> our op`.

    Raises:
        UnsupportedError: A hook is missing in this vLLM.
    """
    return [
        *_replace_custom_ops(),
        *_replace_gemm(),
        *_replace_attention(),
        *_replace_experts(),
        *_replace_sampler(),
    ]


@contextmanager
def without_graphs(llm: Any) -> Iterator[None]:
    """Let an engine of this process run every forward eagerly while the block lasts.

    Raises:
        UnsupportedError: This vLLM keeps its graphs elsewhere.
    """
    (manager,) = llm.collective_rpc(lambda worker: worker.model_runner.cudagraph_manager)
    # A batch finds its graph here, by its number of tokens; one that finds none runs eagerly.
    candidates = hook(manager, "_candidates")
    manager._candidates = {}
    try:
        yield
    finally:
        manager._candidates = candidates


def _replace_custom_ops() -> list[str]:
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import activation, layernorm
    from vllm.model_executor.layers.rotary_embedding import base as rotary_base

    register_oot = hook(hook(custom_op, "CustomOp"), "register_oot")
    register_oot(_norm_class(hook(layernorm, "RMSNorm")), name="RMSNorm")
    register_oot(_activation_class(hook(activation, "SiluAndMul")), name="SiluAndMul")
    register_oot(_rotary_class(hook(rotary_base, "RotaryEmbedding")), name="RotaryEmbedding")
    return [
        "RMSNorm -> add_rms_norm, rms_norm",
        "SiluAndMul -> silu_mul",
        "RotaryEmbedding -> rotary",
    ]


def _norm_class(base: Any) -> Any:
    import torch

    from engines.numerics import cuda

    class SharedRMSNorm(base):  # type: ignore[misc,valid-type]
        """`x`: [rows, hidden]; with a residual returns (norm of the sum, the sum)."""

        def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if self.variance_size_override is not None or not self.has_weight:
                raise UnsupportedError("the shared norm is over a whole row, with a weight")
            rows = x.reshape(-1, x.shape[-1])
            if residual is None:
                return cuda.rms_norm(rows, self.weight.data, self.variance_epsilon).view(x.shape)
            normed, summed = cuda.add_rms_norm(
                rows, residual.reshape(rows.shape), self.weight.data, self.variance_epsilon
            )
            return normed.view(x.shape), summed.view(x.shape)

        forward_native = forward_cuda

    return SharedRMSNorm


def _activation_class(base: Any) -> Any:
    import torch

    from engines.numerics import cuda

    class SharedSiluAndMul(base):  # type: ignore[misc,valid-type]
        """`x`: [rows, 2 * inner], gate before up; returns [rows, inner]."""

        def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.reshape(-1, x.shape[-1]).chunk(2, dim=-1)
            return cuda.silu_mul(gate, up).view(*x.shape[:-1], -1)

        forward_native = forward_cuda

    return SharedSiluAndMul


def _rotary_class(base: Any) -> Any:
    import torch

    from engines import numerics

    class SharedRotaryEmbedding(base):  # type: ignore[misc,valid-type]
        """Full-width neox rotation with float32 frequencies, made as transformers makes them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.rotary_dim != self.head_size or not self.is_neox_style:
                raise UnsupportedError(
                    f"rotary over {self.rotary_dim} of {self.head_size} channels, neox "
                    f"{self.is_neox_style}: the shared op rotates neox halves of the whole head"
                )
            # Made on the host, as the trainer makes them, then moved: `pow` is not exact.
            with torch.device("cpu"):
                frequencies = numerics.rotary_inv_freq(self.base, self.head_size)
            # A buffer, because a deep sleep keeps parameters and buffers and nothing else.
            on_device = frequencies.to(self.cos_sin_cache.device)
            self.register_buffer("shared_inv_freq", on_device, persistent=False)

        def forward_cuda(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            def rotate(x: torch.Tensor) -> torch.Tensor:
                heads = x.unflatten(-1, (-1, self.head_size)) if x.dim() == 2 else x
                rotated = numerics.rotary(heads, positions.flatten(), self.shared_inv_freq)
                return rotated.view(x.shape)

            return rotate(query), None if key is None else rotate(key)

        forward_native = forward_cuda

    return SharedRotaryEmbedding


def _replace_gemm() -> list[str]:
    import torch
    from vllm.model_executor.layers import utils

    from engines import numerics

    hook(utils, "default_unquantized_gemm")
    hook(utils, "dispatch_unquantized_gemm")

    def shared_gemm(
        layer: torch.nn.Module,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = numerics.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    utils.default_unquantized_gemm = shared_gemm
    return ["default_unquantized_gemm -> linear"]


def _replace_attention() -> list[str]:
    from vllm.v1.attention.backends import registry

    backend = hook(hook(registry, "AttentionBackendEnum"), "TRITON_ATTN")
    hook(registry, "register_backend")(
        backend, "engines.rollout.vllm_attention_cuda.SharedAttentionBackend"
    )
    return ["TRITON_ATTN -> attend_pages"]


def _replace_experts() -> list[str]:
    import torch
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    from engines import numerics
    from engines.numerics import cuda

    router_class = hook(fused_topk_router, "FusedTopKRouter")
    experts_class = hook(method, "UnquantizedFusedMoEMethod")
    triton_backend = hook(hook(method, "UnquantizedMoeBackend"), "TRITON")
    hook(router_class, "_compute_routing")
    for name in ("forward_cuda", "forward_native"):
        hook(experts_class, name)

    def compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.scoring_func != "softmax":
            raise UnsupportedError(f"a router by {self.scoring_func!r}; the shared op is a softmax")
        weights, experts = numerics.route(
            router_logits, top_k=self.top_k, normalise=self.renormalize
        )
        return weights, experts.to(indices_type or torch.int32)

    def forward(
        self: Any,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        variants = {
            f"activation {layer.activation.value!r}": layer.activation.value != "silu",
            "experts spread over ranks": layer.expert_map is not None,
            "biases": self.moe.has_bias,
            "shared experts": shared_experts is not None,
            "router weights on the input": layer.apply_router_weight_on_input,
            # Other back ends store the experts in orders of their own.
            f"back end {self.unquantized_backend}": self.unquantized_backend != triton_backend,
        }
        present = [name for name, is_present in variants.items() if is_present]
        if present:
            raise UnsupportedError(
                f"experts with {', '.join(present)}; the shared op has silu and all experts in one "
                "place, without biases"
            )
        gate, up = layer.w13_weight.chunk(2, dim=1)
        return cuda.mix_experts(x, topk_ids, topk_weights, gate, up, layer.w2_weight)

    router_class._compute_routing = compute_routing
    experts_class.forward_cuda = forward
    experts_class.forward_native = forward
    return ["FusedTopKRouter -> route", "UnquantizedFusedMoEMethod -> mix_experts"]


def _replace_sampler() -> list[str]:
    import torch
    from vllm.v1.worker.gpu.sample import logprob, sampler, states

    from engines.numerics import cuda

    sampler_class = hook(sampler, "Sampler")
    native_call = hook(sampler_class, "__call__")
    hook(states, "apply_temperature")
    hook(logprob, "compute_token_logprobs")

    def call(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # vLLM would round the tempered logits to their own dtype.
        return native_call(self, logits.float(), *args, **kwargs)

    def apply_temperature(
        logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        cuda.temper_(logits, expanded_idx_mapping, temperature)

    sampler_class.__call__ = call
    states.apply_temperature = apply_temperature
    logprob.compute_token_logprobs = cuda.token_logprobs
    return [
        "Sampler.__call__ -> float32 logits",
        "apply_temperature -> temper_",
        "compute_token_logprobs -> token_logprobs",
    ]
