"""One rollout engine: vLLM in its own process, on the shared ops or, as a control, on its own.

Invariant (aligned): a sample is a function of weights, prompt, seed and sampling alone; batch,
order, prefix cache and scheduling cannot be seen in it. Weights come from the trainer before the
first sample; until then the engine refuses to draw. A native engine loads a folder.

    engine = VllmEngine(model_dir, spec.model_dump_json(), engine_index=0)
    received = engine.receive(buckets, version=0)
    samples = engine.generate(requests)

The variables of `engines.rollout.group.engine_env` must be set before this module is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from engines.contracts import Sample, SampleRequest
from engines.delays import pause
from engines.environment import ambient_facts, attention_libraries, gpu_uuid
from engines.rollout import plugin, weight_transfer
from engines.rollout.group import NUMERICS_VARIABLE, Policy, engine_env
from engines.rollout.receiving import ReceivesWeights
from engines.rollout.sampling import (
    chosen_logprobs,
    end_of_sequence_ids,
    sampling_params,
    to_sample,
)
from engines.rollout.sleep import Sleeps
from engines.rollout.vllm_options import engine_options
from engines.weights.names import expected_shapes, facts_of, tied_aliases
from model_specs.errors import EngineError, UnsupportedError
from model_specs.run_spec import EvalSampling, RunSpec

EXACT_OPS = frozenset(
    {
        # views, allocation, copies and casts
        "aten.alias", "aten.chunk", "aten.contiguous", "aten.detach", "aten.empty", "aten.flatten",
        "aten.reshape", "aten.slice", "aten.split", "aten.split_with_sizes", "aten.to",
        "aten.unflatten", "aten.view",
        # experts: taken apart, and their result into the engine's own buffer
        "aten.copy_", "aten.empty_like", "aten.unbind",
        # selection of rows
        "aten.embedding",
        # our attention, behind vLLM's own op: `environment()` names the class that it calls
        "vllm.unified_attention_with_output", "vllm.unified_kv_cache_update",
        # our router and experts, behind vLLM's own op: the plugin put them there, or refused
        "vllm.moe_forward",
    }
)  # fmt: skip
"""Ops that may run in vLLM's forward beside the shared ones: each moves values and never rounds."""
LOADED_VERSION = "loaded"
"""Weight version of a native engine, which loads a folder and takes no push."""


class VllmEngine(ReceivesWeights, Sleeps):
    """Draws completions in this process."""

    def __init__(
        self,
        model_dir: str,
        spec: str,
        *,
        engine_index: int = 0,
        policy: Policy = "aligned",
        dtype: Literal["float32", "bfloat16"] | None = None,
        load_format: str | None = None,
    ) -> None:
        """Start vLLM.

        Args:
            model_dir: Hugging Face folder with config and tokenizer; weights only for `native`.
            spec: `RunSpec` as JSON.
            engine_index: Which of `execution.rollout_engines` this is; a label.
            policy: `aligned` installs the shared ops; `stock` and `peer` leave vLLM's own, on
                weights that can be pushed; `native` is vLLM as it comes.
            dtype: Dtype of weights and activations; None takes `numerics.compute_dtype`.
            load_format: vLLM's own; None takes `auto` for native, and `dummy` for the others, whose
                weights are pushed.

        Raises:
            EngineError: The process was not started with the variables of `engine_env`.
            UnsupportedError: The version of vLLM, the model type or its rope scaling is not
                supported.
        """
        super().__init__()
        self._spec = RunSpec.model_validate_json(spec)
        self._model_dir = model_dir
        self._engine_index = engine_index
        self._policy: Policy = policy
        self._dtype = dtype or self._spec.numerics.compute_dtype
        self.check_process()
        config = AutoConfig.from_pretrained(model_dir)
        self._on_cpu = self._spec.execution.device == "cpu"
        _check_supported(config, on_cpu=self._on_cpu)
        self._facts = facts_of(config)
        self._expected = expected_shapes(self._facts)
        plugin.register()
        if policy != "native" and not plugin.installed():
            raise EngineError(f"the hooks of policy {policy} were not installed in this process")
        weight_transfer.register_backend()
        if self._on_cpu:  # on CUDA it would fill every new tensor, inside the graphs too
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._llm = LLM(
            model=model_dir,
            weight_transfer_config=WeightTransferConfig(backend=weight_transfer.BACKEND),
            **engine_options(self._spec, policy=policy, dtype=self._dtype, load_format=load_format),
        )
        self._stop_token_ids = end_of_sequence_ids(model_dir, self._llm.get_tokenizer())
        self._version: str | None = LOADED_VERSION if policy == "native" else None
        self.cached_tokens: dict[str, int] = {}
        """Request id -> prompt tokens that the last `generate` took from the prefix cache."""
        self._llm.init_weight_transfer_engine({"init_info": {}})

    # Drawing.

    def generate(
        self, requests: Sequence[SampleRequest], *, sampling: str | None = None
    ) -> list[Sample]:
        """Draw one sample a request, in the order of `requests`.

        Args:
            requests: What to draw.
            sampling: `EvalSampling` or `SamplingSpec` as JSON; None takes the spec's.

        Raises:
            EngineError: No weights were pushed yet, a prompt leaves no room for a token, vLLM did
                not answer a request, or an answer is not whole (`engines.rollout.sampling`).
        """
        self._require_awake()
        if self._version is None:
            raise EngineError("no weights have been pushed to this engine yet; call receive first")
        chosen = (
            self._spec.sampling if sampling is None else EvalSampling.model_validate_json(sampling)
        )
        params = []
        for request in requests:
            self._check_room(request, chosen.max_new_tokens)
            params.append(sampling_params(chosen, request, stop_token_ids=self._stop_token_ids))
        outputs = self._run(requests, params)
        self.cached_tokens = {name: out.num_cached_tokens or 0 for name, out in outputs.items()}
        return [
            to_sample(
                request,
                outputs[request.request_id],
                stop_token_ids=self._stop_token_ids,
                min_new_tokens=chosen.min_new_tokens,
            )
            for request in requests
        ]

    def last_cached_tokens(self) -> dict[str, int]:
        """Return `cached_tokens`, for a caller in another process."""
        return dict(self.cached_tokens)

    def prompt_logprobs(self, requests: Sequence[SampleRequest]) -> list[tuple[float, ...]]:
        """Score prompts: log-prob (nats, temperature 1) of each prompt token but the first.

        All are computed by prefill, without cached prefixes; a token more is drawn and dropped.

        Raises:
            EngineError: A prompt leaves no room for a token, or a token has no log-prob.
        """
        for request in requests:
            self._check_room(request, 1)
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self._run(requests, [params] * len(requests))
        return [
            chosen_logprobs(
                f"prompt of request {request.request_id}",
                request.prompt_token_ids[1:],
                (outputs[request.request_id].prompt_logprobs or [None])[1:],
            )
            for request in requests
        ]

    def _run(self, requests: Sequence[SampleRequest], params: Sequence[Any]) -> dict[str, Any]:
        """Give all requests to vLLM and wait; return request id -> its finished answer."""
        engine = self._llm.llm_engine
        for request, own in zip(requests, params, strict=True):
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            engine.add_request(request.request_id, prompt, own)
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            pause()
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        wanted = {request.request_id for request in requests}
        if outputs.keys() != wanted:
            raise EngineError(
                f"{len(wanted)} requests, {len(outputs)} answers; without an answer: "
                f"{', '.join(sorted(wanted - outputs.keys())) or 'none'}"
            )
        return outputs

    def preflight(self) -> dict[str, Any]:
        """Audit one drawing (aligned), then run the probes of `engines.gates.preflight`."""
        from engines.gates.preflight import run_probes

        ops = self.audit() if self._policy == "aligned" else ()
        return {**run_probes(self, self._spec), "ops_outside": list(ops)}

    def audit(self) -> tuple[str, ...]:
        """Draw once, prefill and decode; return the ops of vLLM's forward outside the shared ones.

        Raises:
            EngineError: One of them is not on `EXACT_OPS`.
        """
        from engines.gates.audit import OpsOutside, audited, require_exact
        from engines.gates.preflight import probe_request

        model = self._model()
        outside = OpsOutside()
        with audited(model, "forward", outside), audited(model, "compute_logits", outside):
            self.generate([probe_request("audit", 5, self)])
        return require_exact(outside.names, EXACT_OPS, where="vLLM's forward")

    def layer_states(self, requests: Sequence[SampleRequest], *, folder: str) -> list[Sample]:
        """Draw, and write every layer's hidden states for the layer-wise gate into `folder`.

        A replayed CUDA graph calls no module, so what is recorded there is drawn without graphs;
        the answers with graphs must be the same bits.

        Raises:
            EngineError: Graphs change an answer, or rows are missing (`record_rollout`).
        """
        from engines.gates.layerwise import record_rollout

        if self._on_cpu:
            return record_rollout(self, self._model(), requests, folder)
        from engines.rollout.plugin_cuda import without_graphs

        captured: list[Sample] = []
        for request in requests:
            self.reset_prefix_cache()
            captured += self.generate([request])
        with without_graphs(self._llm):
            samples = record_rollout(self, self._model(), requests, folder)
        for eager, graph in zip(samples, captured, strict=True):
            if eager != graph:
                raise EngineError(
                    f"{eager.request_id}: a CUDA graph gives other bits than the same ops without "
                    f"one: tokens {graph.token_ids} and {eager.token_ids}, log-probs "
                    f"{graph.logprobs} and {eager.logprobs}"
                )
        return samples

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._facts.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt with its completion."""
        return int(self._llm.llm_engine.vllm_config.model_config.max_model_len)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes.

        Raises:
            EngineError: vLLM did not, because requests are running.
        """
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not reset its prefix cache, so old weights could answer")

    # Facts.

    def environment(self) -> dict[str, Any]:
        """Return what this process really has: versions, variables, switches, vLLM's settings."""
        import transformers
        import vllm

        return {
            "engine_index": self._engine_index,
            "policy": self._policy,
            "dtype": self._dtype,
            "versions": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "vllm": vllm.__version__,
                "transformers": transformers.__version__,
            },
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "variables": {
                name: os.environ.get(name) for name in sorted(engine_env(self._spec, self._policy))
            },
            "attention_libraries": attention_libraries(),
            "shared_ops": list(plugin.installed()),
            "ambient": {
                **ambient_facts(),
                "gpu": gpu_uuid(),
                "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            },
            "stop_token_ids": list(self._stop_token_ids),
            "tied": tied_aliases(self._facts),
            "vllm_config": self._config_facts(),
        }

    def _config_facts(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context
        backends = {
            type(layer.impl).__name__ for layer in layers.values() if hasattr(layer, "impl")
        }
        return {
            "load_format": str(config.load_config.load_format),
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "page_size": config.cache_config.block_size,
            "kv_cache_bytes": config.cache_config.kv_cache_memory_bytes,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "eager": config.model_config.enforce_eager,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "max_model_len": config.model_config.max_model_len,
            "logprobs_mode": config.model_config.logprobs_mode,
            "generation_config": config.model_config.generation_config,
            "attention": sorted(backends),
        }

    def check_process(self) -> None:
        """Require that this process still has the variables that it has to start with.

        Raises:
            EngineError: One is missing or has another value.
        """
        expected = engine_env(self._spec, self._policy)
        wrong = [
            f"{name} is {os.environ.get(name)!r} instead of {value!r}"
            for name, value in expected.items()
            if os.environ.get(name) != value
        ]
        if wrong:
            raise EngineError(
                "this process was not started with the variables of engine_env: "
                f"{'; '.join(wrong)}; they "
                f"decide bits and are read before torch loads (policy {self._policy}, "
                f"{NUMERICS_VARIABLE})"
            )

    def _check_room(self, request: SampleRequest, max_new_tokens: int) -> None:
        needed = len(request.prompt_token_ids) + max_new_tokens
        if needed > self.max_model_len:
            raise EngineError(
                f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens and "
                f"sampling.max_new_tokens={max_new_tokens} exceed {self.max_model_len}; "
                "vLLM "
                "would cut the completion short and call it finished. Lower data.max_prompt_tokens"
            )


def _check_supported(config: Any, *, on_cpu: bool) -> None:
    """Refuse what the shared ops or vLLM's CPU backend do not have, before anything is started."""
    parameters = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedError(
            f"rope scaling {kind!r} ({parameters}) has no shared op, so vLLM and trainer would "
            "differ; supported: default"
        )
    facts = facts_of(config)
    head_dim = facts.head_dim
    # vLLM's Qwen2 never reads head_dim; Llama's does.
    implied = facts.hidden_size // facts.num_attention_heads
    if config.model_type == "qwen2" and head_dim != implied:
        raise UnsupportedError(
            f"head_dim={head_dim}, but vLLM's Qwen2 always takes hidden_size / num_attention_heads "
            f"= {implied}; the two would be different models"
        )
    if not on_cpu:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in sizes:
        raise UnsupportedError(
            f"head_dim={head_dim}: vLLM's CPU attention takes {', '.join(map(str, sizes))}; choose "
            "num_attention_heads and head_dim accordingly"
        )
