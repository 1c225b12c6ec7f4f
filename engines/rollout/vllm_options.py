"""How vLLM is started on each device; every setting here is read back by `VllmEngine.environment`.

LLM(model=folder, **engine_options(spec, policy="aligned", dtype="bfloat16"))
"""

from __future__ import annotations

from typing import Any

from engines.rollout.group import Policy
from model_specs.run_spec import RunSpec

CPU_PAGE_SIZE = 32
"""Tokens of one page of the KV cache: the smallest that vLLM's CPU backend takes."""
CUDA_PAGE_SIZE = 16
CPU_BATCHED_TOKENS = 2048
"""Tokens of one forward; at least a whole sequence, since prompts are never split."""
CUDA_BATCHED_TOKENS = 8192
"""Tokens of one forward; a prompt may be split, and no bit shows it."""


def engine_options(
    spec: RunSpec, *, policy: Policy, dtype: str, load_format: str | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` but for the model and how weights come.

    Args:
        spec: Of the run.
        policy: Of this engine.
        dtype: Dtype of weights and activations.
        load_format: vLLM's own; None takes `auto` for native, and `dummy` for the others, whose
            weights are pushed.
    """
    lengths = [spec.data.max_prompt_tokens + spec.sampling.max_new_tokens]
    for chosen in spec.plan.evals:
        prompt_tokens = chosen.max_prompt_tokens or spec.data.max_prompt_tokens
        lengths.append(prompt_tokens + chosen.sampling.max_new_tokens)
    length = min(max(lengths), spec.model.max_position_embeddings)
    return {
        "dtype": dtype,
        "load_format": load_format or ("auto" if policy == "native" else "dummy"),
        # The folder's generation_config.json must not change sampling behind the spec's back.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "max_model_len": length,
        "max_num_seqs": spec.execution.max_num_seqs,
        "kv_cache_memory_bytes": spec.execution.kv_cache_mib * 2**20,
        "seed": 0,
        "disable_log_stats": True,
        **start_options(spec, policy=policy, max_model_len=length),
    }


def start_options(spec: RunSpec, *, policy: Policy, max_model_len: int) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM` that depend on the device.

    On CUDA engines capture their decode step in CUDA graphs, without compilation: code that
    inductor fuses is no shared op, and compiles for a minute.
    """
    if spec.execution.device == "cpu":
        return {
            "enforce_eager": True,
            # A prompt in two parts and a seed of its own do not go together on CPU.
            "enable_chunked_prefill": False,
            "async_scheduling": False,
            "max_num_batched_tokens": max(max_model_len, CPU_BATCHED_TOKENS),
            "block_size": CPU_PAGE_SIZE,
        }
    options: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(max_model_len, CUDA_BATCHED_TOKENS),
        "block_size": CUDA_PAGE_SIZE,
        # The cache has its own size; this is only what must be free at the start, beside the
        # trainer and other engines.
        "gpu_memory_utilization": 0.3,
        # Nothing of FlashInfer's runs, and its tuning would draw through the model at the start.
        "kernel_config": {"enable_flashinfer_autotune": False},
    }
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if spec.execution.sleep:
        # Its allocator has to be there from the start, or nothing can be given back.
        options["enable_sleep_mode"] = True
    if policy == "aligned":
        is_shared = spec.numerics.rollout_attention == "shared"
        options["attention_config"] = {"backend": "TRITON_ATTN" if is_shared else "FLASHINFER"}
        # Of the places for experts the one that leaves their matrices as they were loaded.
        options["kernel_config"]["moe_backend"] = "triton"
        options["compilation_config"] = {**graphs, "custom_ops": ["all"]}
    elif policy == "native":  # the control; nothing compiles in an engine's process
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = graphs
        if policy == "peer":
            options["attention_config"] = {"backend": "FLASHINFER"}
    return options
