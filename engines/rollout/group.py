"""All rollout engines as one, seen from the driver.

Invariant: neither the number of engines, nor the order in which requests reach them, nor the order
in which they finish can be seen in an answer: a request carries its own seed, the ops are
batch-invariant, and samples come back in the order of the requests. Imports no torch.

    group = RolloutGroup(handles, spec)
    received = group.receive(buckets, version=3)
    samples = group.generate(requests)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engines.cluster import EngineHandle, gather, gather_work
from engines.contracts import Flip, Sample, SampleRequest
from engines.environment import MAX_CPU_ISA
from engines.turns import Turns
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec, SamplingSpec

Policy = Literal["aligned", "stock", "peer", "native"]
"""`aligned`: the shared ops. `stock`: vLLM's own ops on weights that are not packed away, so that
pushes reach them. `peer`: the same with the switches of the public reference runs. `native`: vLLM
as it comes, which loads a folder and takes no push."""

PEER_VARIABLES: Mapping[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""What the public reference runs set for every process. vLLM 0.26 refuses FlashInfer's attention
together with `VLLM_BATCH_INVARIANT`, so that flag stays unset."""

NUMERICS_VARIABLE = "LOCKSTEP_NUMERICS"
"""What the plugin installs in a process: the shared ops where this says `aligned`."""
PLUGIN_NAME = "lockstep"
"""Name of the `vllm.general_plugins` entry point."""


def engine_env(spec: RunSpec, policy: Policy = "aligned") -> dict[str, str]:
    """Return the variables a rollout engine's process must start with, before torch loads in it."""
    cuda = {
        # As in the trainer's process. The shared products do not run on cuBLAS; should one get
        # there, it must at least repeat.
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        # FlashInfer's sampler compiles for minutes at its first use, and draws are not its own.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # The plugin's hooks are in this runner, which draws by seed and position in one launch.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # What vLLM's batch-invariant mode sets. One engine has one GPU and adds nothing up over
        # NCCL; a broadcast of weights has one algorithm, the trainer's.
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_NVLS_ENABLE": "0",
        # Engines and trainer share the device: Ray is not asked for it and must not hide it.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    if policy == "peer":
        del cuda["CUBLASLT_WORKSPACE_SIZE"]
        cuda |= PEER_VARIABLES
    return {
        **(cuda if spec.execution.device == "cuda" else {}),
        NUMERICS_VARIABLE: policy,
        # One process, so that the plugin, the weights and the threads are those we read back.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Only our own plugin: another one could replace an op behind our back.
        "VLLM_PLUGINS": PLUGIN_NAME,
        # As in the trainer's process; vLLM's own ops take what this CPU has.
        "ONEDNN_MAX_CPU_ISA": MAX_CPU_ISA if policy == "aligned" else "DEFAULT",
        # Two engines on one machine must not be bound to the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # A compiled op is not the shared op; and compilation costs 30 s.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(spec.execution.threads),
        "MKL_NUM_THREADS": str(spec.execution.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class RolloutGroup:
    """`engines.contracts.RolloutEngine` over several engine processes of one policy."""

    def __init__(self, handles: Sequence[EngineHandle], spec: RunSpec) -> None:
        if not handles:
            raise EngineError("a rollout group needs at least one engine, got none")
        self._handles = tuple(handles)
        self._spec = spec
        self._turns: Turns | None = None

    @property
    def handles(self) -> tuple[EngineHandle, ...]:
        """The engines' processes, in order."""
        return self._handles

    def take_turns(self, turns: Turns) -> None:
        """Have the engines woken before they are used, and the trainer sent to sleep for it."""
        self._turns = turns

    def call_first(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the first engine, woken; returns a reference at once."""
        self._wake()
        return self._handles[0].call(method, *args, **kwargs)

    def _wake(self) -> None:
        if self._turns is not None:
            self._turns.need("rollout")

    def generate(
        self, requests: Sequence[SampleRequest], *, sampling: SamplingSpec | None = None
    ) -> tuple[Sample, ...]:
        """Draw one sample a request, in the order of `requests`.

        Args:
            requests: What to draw; ids must be unique.
            sampling: Used instead of the spec's own, for example for an evaluation.

        Raises:
            EngineError: Ids are not unique, or an engine answered for other requests than it was
                given.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            twice = sorted({name for name in ids if ids.count(name) > 1})
            raise EngineError(
                f"request ids must be unique; there more than once: {', '.join(twice)}"
            )
        order = list(requests)
        if self._spec.execution.request_order_seed is not None:
            random.Random(self._spec.execution.request_order_seed).shuffle(order)
        self._wake()
        parts = [order[index :: len(self._handles)] for index in range(len(self._handles))]
        options = {"sampling": sampling.model_dump_json()} if sampling is not None else {}
        answers = gather_work(
            [
                handle.call("generate", part, **options)
                for handle, part in zip(self._handles, parts, strict=True)
                if part
            ],
            what="rollout",
            execution=self._spec.execution,
        )
        samples = {sample.request_id: sample for answer in answers for sample in answer}
        if samples.keys() != set(ids) or sum(map(len, answers)) != len(ids):
            raise EngineError(
                f"{len(ids)} requests were sent and {sum(map(len, answers))} samples came back; "
                "missing: "
                f"{', '.join(sorted(set(ids) - samples.keys())) or 'none'}; unknown: "
                f"{', '.join(sorted(samples.keys() - set(ids))) or 'none'}"
            )
        return tuple(samples[name] for name in ids)

    def receive(
        self,
        buckets: Sequence[Any],
        *,
        version: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> Mapping[str, str]:
        """Give a full set of weights, all at once, to all engines; return name -> digest.

        `TrainerGroup.push` sends bucket by bucket; this is for buckets that exist already.

        Args:
            buckets: `engines.weights.wire` buckets, or references to them.
            version: Step whose weights these are.
            flip: With probe `received`, one bit of the stored tensor is flipped in every engine.
            keep_to: Folder where the first engine also writes `received.safetensors`, what it
                holds.

        Raises:
            EngineError: A tensor is missing, unknown or there twice, or two engines hold different
                bits.
        """
        self._wake()
        digests = gather_work(
            [
                handle.call(
                    "receive",
                    list(buckets),
                    version=version,
                    flip=flip,
                    keep_to=keep_to if index == 0 else None,
                )
                for index, handle in enumerate(self._handles)
            ],
            what="weight push",
            execution=self._spec.execution,
        )
        return self.agreed(digests, version=version)

    def agreed(self, digests: Sequence[Mapping[str, str]], *, version: int) -> Mapping[str, str]:
        """Return the digests that all engines have.

        Raises:
            EngineError: Two engines hold different bits.
        """
        for handle, other in zip(self._handles[1:], digests[1:], strict=True):
            differing = sorted(
                name
                for name in digests[0].keys() | other.keys()
                if digests[0].get(name) != other.get(name)
            )
            if differing:
                name = differing[0]
                raise EngineError(
                    f"{len(differing)} tensors differ between {self._handles[0].name} and "
                    f"{handle.name} "
                    f"after the push of version {version}; first {name}: {digests[0].get(name)} "
                    "and "
                    f"{other.get(name)}"
                )
        received: Mapping[str, str] = digests[0]
        return received

    def environment(self) -> dict[str, Mapping[str, Any]]:
        """Return engine name -> the facts read back in its process."""
        values = gather(
            [handle.call("environment") for handle in self._handles], what="environment"
        )
        return {handle.name: value for handle, value in zip(self._handles, values, strict=True)}

    def preflight(self) -> dict[str, Mapping[str, Any]]:
        """Run the probes of `engines.gates.preflight` in every engine; return name -> result."""
        self._wake()
        values = gather_work(
            [handle.call("preflight") for handle in self._handles],
            what="preflight",
            execution=self._spec.execution,
        )
        return {handle.name: value for handle, value in zip(self._handles, values, strict=True)}
