"""All trainer ranks as one trainer, seen from the driver.

Invariant: every call goes to every rank with the same arguments, in one order, since each of them
is a collective; rank 0 answers. No result depends on the number of ranks. Imports no torch.

    trainer = TrainerGroup(handles, spec)
    root = trainer.score(samples)
    record = trainer.update(samples, step=1, update=0)
    references, sent = trainer.send(version=1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.cluster import EngineHandle, gather_work
from engines.contracts import Flip, TrainSample, UpdateRecord
from engines.environment import MAX_CPU_ISA
from engines.host import CALLED_ASLEEP
from engines.rollout.group import PEER_VARIABLES, RolloutGroup
from engines.train.registry import TRAINERS
from engines.turns import Turns
from engines.weights.push import connect, push
from model_specs.errors import CheckpointError, EngineError
from model_specs.run_spec import RunSpec


def trainer_env(spec: RunSpec) -> dict[str, str]:
    """Return the variables a trainer rank's process must start with, before torch loads in it."""
    threads = str(spec.execution.threads)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A row's bits must not depend on how many rows there are.
        "ONEDNN_MAX_CPU_ISA": MAX_CPU_ISA,
        # A compiled op is not the shared op.
        "TORCHDYNAMO_DISABLE": "1",
        # Read by cuBLAS and Transformer Engine where the device is a GPU; inert on CPU.
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        # What Megatron's deterministic mode accepts; read when NCCL makes its first communicator.
        "NCCL_ALGO": "Ring",
        # Reductions inside of the switch have an order of their own.
        "NCCL_NVLS_ENABLE": "0",
        # Trainer and engines share the device: Ray is not asked for it and must not hide it.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.numerics.policy == "peer":
        del variables["CUBLASLT_WORKSPACE_SIZE"]
        variables |= PEER_VARIABLES
    return variables


class TrainerGroup:
    """`engines.contracts.Trainer` over the processes of all ranks; handle r is rank r."""

    def __init__(self, handles: Sequence[EngineHandle], spec: RunSpec) -> None:
        if len(handles) != spec.execution.trainer_ranks:
            raise EngineError(
                f"{len(handles)} trainer processes were given, but "
                f"execution.trainer_ranks={spec.execution.trainer_ranks}"
            )
        self._handles = tuple(handles)
        self._spec = spec
        self._turns: Turns | None = None
        self._version = 0

    def connect(self, rollout: RolloutGroup, *, rendezvous: str | Path) -> Turns:
        """Open the way of the weights to the engines, and take turns with them; return the turns.

        Args:
            rollout: The started engines.
            rendezvous: Path of a file that does not exist yet and that all processes can reach.
        """
        connect(self._handles, rollout.handles, self._spec, rendezvous=rendezvous)
        self._turns = Turns(
            self._handles,
            rollout.handles,
            level=self._spec.execution.sleep,
            push_again=lambda: self._push_again(rollout),
        )
        rollout.take_turns(self._turns)
        return self._turns

    def start(self, spec: RunSpec, *, dcp_dir: str | Path, rendezvous: str) -> None:
        """Make the trainer in every rank's process; all of them meet at `rendezvous` (file://...)."""
        created = [
            handle.actor.create.remote(
                TRAINERS[spec.trainer],
                spec.model_dump_json(),
                dcp_dir=str(dcp_dir),
                rank=rank,
                world_size=len(self._handles),
                rendezvous=rendezvous,
            )
            for rank, handle in enumerate(self._handles)
        ]
        self._gather(created, what="start of the trainer")

    def score(self, samples: Sequence[TrainSample], *, flip: Flip | None = None) -> str:
        """Score all samples at the current weights; return the root digest of log-probs."""
        root: str = self._all("score", list(samples), flip=flip)[0]
        return root

    def scores(self) -> Mapping[str, tuple[float, ...]]:
        """Reveal request id -> log-probs (float32 values) of the last `score`."""
        scores: Mapping[str, tuple[float, ...]] = self._first("scores")
        return scores

    def update(
        self,
        samples: Sequence[TrainSample],
        *,
        step: int,
        update: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> UpdateRecord:
        """One optimizer step on these samples; `keep_to` is a folder for `<probe>.safetensors`."""
        record: UpdateRecord = self._all(
            "update", list(samples), step=step, update=update, flip=flip, keep_to=keep_to
        )[0]
        if self._turns is None or not self._turns.memory:
            return record
        return replace(record, metrics={**record.metrics, **self._turns.memory})

    def layer_states(self, samples: Sequence[TrainSample], *, folder: str | Path) -> None:
        """Write every layer's hidden states of these samples for the layer-wise gate."""
        self._all("layer_states", list(samples), folder=str(folder))

    def send(
        self, *, version: int, flip: Flip | None = None, keep_to: str | None = None
    ) -> tuple[Sequence[Any], Mapping[str, str]]:
        """Cast to the wire dtype, for no connected engine; return all buckets, name -> digest."""
        references, digests = self._all("send", version=version, flip=flip, keep_to=keep_to)[0]
        return references, digests

    def push(
        self,
        rollout: RolloutGroup,
        *,
        version: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Send all weights to all engines, bucket by bucket; return sent and received digests."""
        if self._turns is None:
            raise EngineError("trainer and engines are not connected; call connect first")
        self._turns.need("push")
        sent, received = push(
            self._handles,
            rollout.handles,
            self._spec,
            version=version,
            flip=flip,
            keep_to=keep_to,
        )
        self._turns.weights_arrived()
        self._version = version
        return sent, rollout.agreed(received, version=version)

    def _push_again(self, rollout: RolloutGroup) -> None:
        """Bring back what the engines held before they discarded it."""
        sent, received = self.push(rollout, version=self._version)
        if sent != received:
            raise EngineError(
                f"after a deep sleep the weights of version {self._version} were pushed again, and "
                "what the engines hold is not what was sent"
            )

    def weight_digests(self) -> Mapping[str, str]:
        """Name -> digest of the float32 masters."""
        digests: Mapping[str, str] = self._all("weight_digests")[0]
        return digests

    def state_digest(self) -> str:
        """Digest of weights, optimizer state and progress; all ranks must give the same."""
        digests = self._all("state_digest")
        if len(set(digests)) != 1:
            raise EngineError(f"trainer ranks disagree about the state digest: {digests}")
        state: str = digests[0]
        return state

    def ensure_at(self, path: str | Path, digest: str) -> bool:
        """Bring the trainer to the state at `path`; returns whether something was loaded.

        Raises:
            CheckpointError: What was loaded is not the state that was asked for.
        """
        if self.state_digest() == digest:
            return False
        self.load(path)
        loaded = self.state_digest()
        if loaded != digest:
            raise CheckpointError(
                f"{path} holds state {loaded}, but {digest} was asked for; "
                "name the checkpoint that the ledger or the lock records"
            )
        return True

    def load(self, path: str | Path) -> None:
        """Load a checkpoint, or the run's converted initial weights."""
        self._all("load", str(path))

    def save(
        self, path: str | Path, *, chain_digest: str, attempt: int, run_folder: str | Path | None
    ) -> str:
        """Write a committed checkpoint at `path` and return its state digest.

        `attempt` is recorded; with `run_folder` a stale attempt is refused before the checkpoint
        becomes visible.
        """
        state: str = self._all(
            "save",
            str(path),
            chain_digest=chain_digest,
            attempt=attempt,
            run_folder=None if run_folder is None else str(run_folder),
        )[0]
        return state

    def environment(self) -> dict[str, Any]:
        """What rank 0's process really has; ranks must agree on what decides bits."""
        environments = self._all("environment")
        for rank, other in enumerate(environments):
            different = sorted(
                key
                for key in environments[0].keys() | other.keys()
                if key != "ambient" and environments[0].get(key) != other.get(key)
            )
            if different:
                key = different[0]
                raise EngineError(
                    f"trainer rank {rank} runs in another environment than rank 0: {key} is "
                    f"{other.get(key)!r} there and {environments[0].get(key)!r} here; start all "
                    "ranks from one environment"
                )
        environment: dict[str, Any] = environments[0]
        return environment

    def audit(self) -> tuple[str, ...]:
        """Names of the exact ops that ran outside the shared ones in one forward."""
        names: tuple[str, ...] = self._all("audit")[0]
        return names

    def close(self) -> None:
        """Leave the process group on every rank; the processes stay."""
        self._all("close")

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._turns is not None and method not in CALLED_ASLEEP:
            self._turns.need("trainer")
        references = [handle.call(method, *args, **kwargs) for handle in self._handles]
        return self._gather(references, what=f"trainer {method}")

    def _first(self, method: str, *args: Any) -> Any:
        if self._turns is not None:
            self._turns.need("trainer")
        return self._gather([self._handles[0].call(method, *args)], what=f"trainer {method}")[0]

    def _gather(self, references: Sequence[Any], *, what: str) -> list[Any]:
        return gather_work(references, what=what, execution=self._spec.execution)
