"""The training state of one rank: masters, moments and progress, their digest, load and save.

Invariant: two trainers with equal `digest()` go on bit for bit the same, whatever their number of
ranks; a state that was loaded is the one its checkpoint names.

    state = TrainingState(shards, optimizer, initial_dir=dir, trajectory=key, storage=DcpStorage())
    state.load(path)
    state.save(path, chain_digest=head, attempt=1)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engines.checkpoint.dcp import (
    CheckpointMeta,
    DcpStorage,
    Storage,
    read_meta,
    write_checkpoint,
)
from engines.provenance.digest import digest_json, root_digest
from engines.provenance.fence import Fence
from engines.train.optimizer import ShardedAdamW
from engines.train.shards import Shard, distributed, merged_digests
from model_specs.errors import CheckpointError


class TrainingState:
    """What a checkpoint holds; every method but the constructor is a collective."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        optimizer: ShardedAdamW,
        *,
        initial_dir: str | Path,
        trajectory: str,
        storage: Storage,
    ) -> None:
        """Wrap live tensors; `initial_dir` is the folder of the run's converted initial weights.

        `storage` writes and reads checkpoints; the initial folder is plain DCP for every trainer.
        """
        self._shards = shards
        self._optimizer = optimizer
        self._initial_dir = Path(initial_dir).resolve()
        self._trajectory = trajectory
        self._storage = storage
        self.step = 0
        """Last step that was updated; the data cursor."""
        self.samples_consumed = 0

    def moments(self) -> dict[str, Shard]:
        """Return `exp_avg.<name>` and `exp_avg_sq.<name>` -> the live moments."""
        return self._optimizer.named_moments(self._shards)

    def weight_digests(self) -> dict[str, str]:
        """Return name -> digest of the live float32 masters."""
        return merged_digests(self._shards)

    def digest(self) -> str:
        """Return the digest of weights, optimizer state and progress.

        Before the first update it is the root of the weights' digests alone, which is known of a
        converted folder too.
        """
        digests = self.weight_digests()
        if self._optimizer.num_steps:
            moments = merged_digests(self.moments())
            digests |= {f"optimizer.{name}": digest for name, digest in moments.items()}
            digests["progress"] = digest_json(self._progress())
        return root_digest(digests)

    def load(self, path: str | Path) -> None:
        """Load a checkpoint of this trajectory, or the initial folder.

        Raises:
            CheckpointError: Torn, foreign, damaged, or not the state its meta names; in the last
                two cases the live state is lost and the trainer must be started again.
        """
        if Path(path).resolve() == self._initial_dir:
            self.load_initial()
            return
        meta = read_meta(path, trajectory=self._trajectory)
        tensors = self._tensors()
        self._storage.read(path, tensors)
        self.step = int(tensors["progress.step"])
        self.samples_consumed = int(tensors["progress.samples_consumed"])
        self._optimizer.num_steps = int(tensors["progress.updates"])
        found = self.digest()
        if found != meta.state_digest:
            raise CheckpointError(
                f"{path} says it holds state {meta.state_digest}, but its tensors have {found}; "
                "it was damaged after it was written: resume from an older one"
            )

    def load_initial(self) -> None:
        """Load the initial weights and forget all training."""
        DcpStorage().read(self._initial_dir, self._weights())
        self._optimizer.reset()
        self.step = 0
        self.samples_consumed = 0

    def save(
        self, path: str | Path, *, chain_digest: str, attempt: int, run_folder: str | None
    ) -> str:
        """Write, verify and commit a checkpoint; return its state digest."""
        state = self.digest()
        write_checkpoint(
            path,
            self._tensors(),
            meta=CheckpointMeta(
                trajectory=self._trajectory,
                state_digest=state,
                chain_digest=chain_digest,
                attempt=attempt,
                **self._progress(),
            ),
            fence=None if run_folder is None else Fence(run_folder, attempt),
            storage=self._storage,
        )
        return state

    def _progress(self) -> dict[str, int]:
        return {
            "step": self.step,
            "updates": self._optimizer.num_steps,
            "samples_consumed": self.samples_consumed,
        }

    def _weights(self) -> dict[str, torch.Tensor]:
        return {
            f"model.{name}": shard.local if shard.sharded is None else shard.sharded
            for name, shard in self._shards.items()
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Flat checkpoint key -> live tensor; the progress is a copy."""
        tensors = self._weights()
        for name, shard in self.moments().items():
            tensors[f"optimizer.{name}"] = distributed(shard, shard.local)
        for name, value in self._progress().items():
            tensors[f"progress.{name}"] = torch.tensor(value, dtype=torch.int64)
        return tensors
