"""The shared ops under vLLM's own model classes.

Entry point `vllm.general_plugins: lockstep`. Inert unless the process was started with
`LOCKSTEP_NUMERICS=aligned`, so that installing Lockstep changes nobody else's vLLM. With `stock` or
`peer` one thing is replaced, on CPU alone: linears are torch's own on weights that stay where they
are, where vLLM's CPU backend would pack them away and no push could reach them.

Invariant: after `register()` every op of a dense decoder that rounds is one of `engines.numerics`,
the same function that the trainer calls; `installed()` says which were put in place. A hook that
this vLLM does not have is an error that names it, never a silent native op.

| in vLLM | replaced by |
| --- | --- |
| `RMSNorm` (with residual: add, then norm) | `add`, `rms_norm` |
| `SiluAndMul` | `silu_mul` |
| `RotaryEmbedding` | `rotary` |
| `dispatch_cpu_unquantized_gemm`: linears and the output head | `linear` |
| `AttentionBackendEnum.CPU_ATTN` | `paged_attention_batch` (`engines.rollout.vllm_attention`) |
| `cpu_router._softmax_topk` | `route` |
| `CPUUnquantizedExperts` | `expert_mlp` |
| `Sampler.compute_logprobs`, `TopKTopPSampler.forward_cpu` | `log_softmax_rows` |

That is the CPU's table; CUDA's is in `engines.rollout.plugin_cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from engines.rollout.group import NUMERICS_VARIABLE
from model_specs.errors import UnsupportedError

TESTED_VERSIONS: Mapping[str, tuple[str, ...]] = {"cpu": ("0.32.0",), "cuda": ("0.26.0",)}
"""By device. The hooks are internal to vLLM: any other version is refused until the tests have run
on it."""

_installed: list[str] = []


def register() -> None:
    """Install the shared ops in this process, once, and only where it was asked to.

    Raises:
        UnsupportedError: The version of vLLM is not a tested one, a hook is missing, or there is no
            set of hooks for the platform.
    """
    policy = os.environ.get(NUMERICS_VARIABLE)
    if policy not in ("aligned", "stock", "peer") or _installed:
        return
    import vllm
    from vllm.platforms import current_platform

    device = current_platform.device_type
    installer = _INSTALLERS.get(device)
    if installer is None:
        raise UnsupportedError(
            f"no shared ops for vLLM on {device!r}; there are some for "
            f"{', '.join(sorted(_INSTALLERS))}"
        )
    check_version(vllm.__version__, device=device)
    _installed.extend(installer() if policy == "aligned" else _keep_weights_unpacked(device))


def installed() -> tuple[str, ...]:
    """Return what was replaced in this process, as `vLLM's name -> our op`."""
    return tuple(_installed)


def check_version(found: str, *, device: str = "cpu") -> None:
    """Refuse a vLLM on which the hooks were never tested.

    Args:
        found: `vllm.__version__`, with or without a local part such as `+cpu`.
        device: vLLM's name of the platform's device.

    Raises:
        UnsupportedError: `found` is not a tested version.
    """
    tested = TESTED_VERSIONS.get(device, ())
    if found.partition("+")[0] not in tested:
        raise UnsupportedError(
            f"vLLM {found} was never tested with the shared ops on {device}; tested: "
            f"{', '.join(tested) or 'none'}. "
            "Install the pinned version, or set numerics to native ops and lose the alignment gate"
        )


def hook(owner: Any, name: str) -> Any:
    """Return `owner.name`, a place where an op is put in.

    Raises:
        UnsupportedError: This vLLM has no such place.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        where = getattr(owner, "__name__", repr(owner))
        raise UnsupportedError(
            f"this vLLM has no {where}.{name}, where a shared op has to go; without it the op "
            "would "
            f"silently be vLLM's own. Tested: {dict(TESTED_VERSIONS)}"
        ) from error


def _install_cpu() -> list[str]:
    return [
        *_replace_custom_ops(),
        *_replace_gemm(),
        *_replace_attention(),
        *_replace_experts(),
        *_replace_logprobs(),
    ]


def _replace_custom_ops() -> list[str]:
    import torch
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers import activation, layernorm
    from vllm.model_executor.layers.rotary_embedding import base as rotary_base

    from engines import numerics

    rms_norm_class = hook(layernorm, "RMSNorm")
    silu_class = hook(activation, "SiluAndMul")
    rotary_class = hook(rotary_base, "RotaryEmbedding")
    register_oot = hook(hook(custom_op, "CustomOp"), "register_oot")

    class SharedRMSNorm(rms_norm_class):  # type: ignore[misc,valid-type]
        """`x`: [rows, hidden]; with a residual returns (norm of the sum, the sum)."""

        def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            summed = x if residual is None else numerics.add(x, residual)
            rows = summed.reshape(-1, summed.shape[-1])
            normed = numerics.rms_norm(rows, self.weight.data, self.variance_epsilon)
            normed = normed.view(summed.shape)
            return normed if residual is None else (normed, summed)

        forward_native = forward_cpu

    class SharedSiluAndMul(silu_class):  # type: ignore[misc,valid-type]
        """`x`: [rows, 2 * inner], gate before up; returns [rows, inner]."""

        def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.reshape(-1, x.shape[-1]).chunk(2, dim=-1)
            return numerics.silu_mul(gate.contiguous(), up.contiguous()).view(*x.shape[:-1], -1)

        forward_native = forward_cpu

    class SharedRotaryEmbedding(rotary_class):  # type: ignore[misc,valid-type]
        """Full-width neox rotation with float32 frequencies, made as transformers makes them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.rotary_dim != self.head_size or not self.is_neox_style:
                raise UnsupportedError(
                    f"rotary over {self.rotary_dim} of {self.head_size} channels, neox "
                    f"{self.is_neox_style}: the shared op rotates neox halves of the whole head"
                )
            self.shared_inv_freq = numerics.rotary_inv_freq(self.base, self.head_size)

        def forward_cpu(
            self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            def rotate(x: torch.Tensor) -> torch.Tensor:
                heads = x.reshape(x.shape[0], -1, self.head_size)
                rotated = numerics.rotary(heads, positions.flatten(), self.shared_inv_freq)
                return rotated.reshape(x.shape)

            return rotate(query), None if key is None else rotate(key)

        forward_native = forward_cpu

    register_oot(SharedRMSNorm, name="RMSNorm")
    register_oot(SharedSiluAndMul, name="SiluAndMul")
    register_oot(SharedRotaryEmbedding, name="RotaryEmbedding")
    return ["RMSNorm -> add, rms_norm", "SiluAndMul -> silu_mul", "RotaryEmbedding -> rotary"]


def _keep_weights_unpacked(device: str) -> list[str]:
    import torch

    if device != "cpu":
        return ["default_unquantized_gemm -> itself, on weights as they were loaded"]
    _replace_linear(torch.nn.functional.linear)
    return ["dispatch_cpu_unquantized_gemm -> torch.nn.functional.linear"]


def _replace_gemm() -> list[str]:
    import torch

    from engines import numerics

    def shared_linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out = numerics.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    _replace_linear(shared_linear)
    return ["dispatch_cpu_unquantized_gemm -> linear"]


def _replace_linear(linear: Callable[..., Any]) -> None:
    """Let every unquantised layer call `linear(x, weight, bias)` on its own weight."""
    import torch
    from vllm.model_executor.layers import utils

    hook(utils, "dispatch_cpu_unquantized_gemm")
    hook(utils, "cpu_unquantized_gemm")

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        # The weight is never packed away: pushes copy into it and digests are read from it.
        if layer.weight.ndim != 2:
            raise UnsupportedError(
                f"{type(layer).__name__} has a weight of {layer.weight.ndim} dimensions; the "
                "linear that takes pushes takes matrices"
            )
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _replace_attention() -> list[str]:
    from vllm.v1.attention.backends import registry

    backend = hook(hook(registry, "AttentionBackendEnum"), "CPU_ATTN")
    hook(registry, "register_backend")(
        backend, "engines.rollout.vllm_attention.SharedAttentionBackend"
    )
    return ["CPU_ATTN -> paged_attention_batch"]


def _replace_experts() -> list[str]:
    import torch
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    from engines import numerics

    experts_class = hook(cpu_moe, "CPUUnquantizedExperts")
    hook(cpu_router, "_softmax_topk")
    for name in ("apply", "process_weights_after_loading", "_supports_grouped_gemm"):
        hook(experts_class, name)

    def softmax_topk(
        router_logits: torch.Tensor, top_k: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = numerics.route(router_logits, top_k=top_k, normalise=renormalize)
        return weights, experts.to(torch.int32)

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        *_: Any,
        **variants: Any,
    ) -> None:
        if activation.value != "silu" or variants.get("expert_map") is not None:
            raise UnsupportedError(
                f"experts with activation {activation.value!r} or spread over ranks; the shared op "
                "has silu and all experts in one place"
            )
        gates, ups = zip(*(fused.chunk(2) for fused in w1.unbind(0)), strict=True)
        chosen = topk_ids.long()
        output.copy_(
            numerics.expert_mlp(hidden_states, chosen, topk_weights, gates, ups, w2.unbind(0))
        )

    def keep_weights(self: Any, layer: torch.nn.Module) -> None:
        # Never packed away: pushes copy into the weights and digests are read from them.
        self._use_zentorch = False

    experts_class.apply = apply
    experts_class.process_weights_after_loading = keep_weights
    # The shared op has no alignment to ask for.
    experts_class._supports_grouped_gemm = classmethod(lambda cls, moe_config: (True, None))
    cpu_router._softmax_topk = softmax_topk
    return ["_softmax_topk -> route", "CPUUnquantizedExperts -> expert_mlp"]


def _replace_logprobs() -> list[str]:
    import torch
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    from engines import numerics

    sampler_class = hook(sampler, "Sampler")
    draw_class = hook(topk_topp_sampler, "TopKTopPSampler")
    hook(sampler_class, "compute_logprobs")
    native_draw: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = hook(
        draw_class, "forward_cpu"
    )

    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return numerics.log_softmax_rows(logits.float())

    def forward_cpu(
        self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # vLLM draws here and computes processed log-probs by a softmax of its own: ask it for the
        # logits it drew from instead, and take the shared log-softmax of them.
        if self.logprobs_mode != "processed_logprobs":
            return native_draw(self, logits, generators, k, p)
        self.logprobs_mode = "processed_logits"
        try:
            drawn, processed = native_draw(self, logits, generators, k, p)
        finally:
            self.logprobs_mode = "processed_logprobs"
        return drawn, None if processed is None else compute_logprobs(processed)

    sampler_class.compute_logprobs = staticmethod(compute_logprobs)
    draw_class.forward_cpu = forward_cpu
    return [
        "Sampler.compute_logprobs -> log_softmax_rows",
        "TopKTopPSampler.forward_cpu -> log_softmax_rows",
    ]


def _install_cuda() -> list[str]:
    from engines.rollout.plugin_cuda import install

    return install()


_INSTALLERS: dict[str, Callable[[], list[str]]] = {"cpu": _install_cpu, "cuda": _install_cuda}
