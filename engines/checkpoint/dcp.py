"""Checkpoints of the whole training state through `torch.distributed.checkpoint`.

A checkpoint is a folder: DCP's files and `meta.json`. It is written aside under a name ending in
`.partial`, read back and compared bit for bit, given its `meta.json` last, and renamed. Invariant:
a folder with the final name is complete and was verified; one without a readable `meta.json` is
torn and is refused, and so is one of another trajectory. The number of ranks may differ between
writing and reading.

Keys: `model.<name>` float32 masters, `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>`,
and `progress.{step,updates,samples_consumed}` (int64 scalars). The folder that a conversion makes
has the `model.` keys only and no meta.

Reading the meta imports no torch; `engines.runs.checkpoints` lists those of a leg:

    meta = read_meta(folder, trajectory=trajectory_fingerprint(spec))
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.provenance.fence import Fence, sync_folder, write_durably
from model_specs.errors import CheckpointError, LockstepError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHECKPOINT_SCHEMA_VERSION = 1
META_FILE = "meta.json"
PARTIAL_SUFFIX = ".partial"
REPLACED_SUFFIX = ".replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says about itself."""

    trajectory: str
    """Trajectory fingerprint of the run's spec."""
    step: int
    """Last finished step; the data cursor is the step, so the next one drawn is `step + 1`."""
    updates: int
    """Optimizer steps so far."""
    samples_consumed: int
    state_digest: str
    chain_digest: str
    """Head of the ledger at `step`."""
    attempt: int
    """Token of the attempt that wrote it."""
    schema_version: int = CHECKPOINT_SCHEMA_VERSION


class Storage(Protocol):
    """How the tensors of a checkpoint are laid down in a folder; a collective both ways."""

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors into a folder that does not exist yet."""

    def read(self, path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of these keys in place; `CheckpointError` as `read_tensors`."""


class DcpStorage:
    """`torch.distributed.checkpoint` as it comes."""

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write each rank's part."""
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(tensors), checkpoint_id=str(path), no_dist=not _has_ranks())

    def read(self, path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load each rank's part."""
        read_tensors(path, tensors)


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def read_meta(path: str | Path, *, trajectory: str | None = None) -> CheckpointMeta:
    """Return the meta of a committed checkpoint.

    Args:
        path: The checkpoint's folder.
        trajectory: Fingerprint that it must have; None accepts any.

    Raises:
        CheckpointError: Torn, of another schema version, or of another trajectory.
    """
    file = Path(path) / META_FILE
    try:
        values: dict[str, Any] = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no {META_FILE}; resume from one that "
            "has, older ones in the same folder are kept"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file} is torn: {error}; resume from an older one") from error
    version = values.get("schema_version")
    if version != CHECKPOINT_SCHEMA_VERSION:
        raise CheckpointError(
            f"{file} has schema version {version!r}; this version of Lockstep reads "
            f"{CHECKPOINT_SCHEMA_VERSION}"
        )
    try:
        meta = CheckpointMeta(**values)
    except TypeError as error:
        raise CheckpointError(f"{file} is torn: {error}; resume from an older one") from error
    if trajectory is not None and meta.trajectory != trajectory:
        raise CheckpointError(
            f"{path} belongs to trajectory {meta.trajectory}, this run's is {trajectory}; resume "
            "it with the spec it was made with"
        )
    return meta


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    meta: CheckpointMeta,
    fence: Fence | None = None,
    storage: Storage | None = None,
) -> None:
    """Write, verify and commit a checkpoint; every rank calls it with its part.

    Args:
        path: Final folder; a checkpoint that is there already is replaced.
        tensors: Flat key -> plain or distributed tensor.
        meta: Written last.
        fence: A stale attempt is refused at the moment of the rename.
        storage: How the tensors are laid down; None takes `DcpStorage`.

    Raises:
        CheckpointError: What was read back is not what was written.
        StaleAttemptError: A newer attempt of the run has started.
    """
    chosen = storage or DcpStorage()
    final = Path(path)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    _once(lambda: _clear(partial))
    chosen.write(partial, tensors)
    _verify(partial, tensors, chosen)
    _once(lambda: _commit(partial, final, meta, fence))


def read_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of these keys in place, each rank its own part.

    Raises:
        CheckpointError: A key is missing, has another shape, or its file is damaged.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        dcp.load(dict(tensors), checkpoint_id=str(path), no_dist=not _has_ranks())
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {last_line(error)}; it is damaged or not of this model"
        ) from error


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text: torch puts its cause there, below a traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _clear(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)


def _verify(partial: Path, tensors: Mapping[str, torch.Tensor], storage: Storage) -> None:
    """Read everything back, one kind of tensor at a time, and compare bits."""
    import torch

    unequal: list[str] = []
    for keys in _kinds(tensors):
        # `zeros_like` keeps each tensor's layout over the ranks.
        loaded = {key: torch.zeros_like(tensors[key]) for key in keys}
        storage.read(partial, loaded)
        unequal += [key for key in keys if not _same_bits(tensors[key], loaded[key])]
    by_rank = _gathered(unequal)
    for rank, keys in enumerate(by_rank):
        if keys:
            raise CheckpointError(
                f"{partial}: {keys[0]} ({len(keys)} tensors of rank {rank}) was read back with "
                "other bits than were written; the disk is not to be trusted"
            )


def _kinds(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    kinds: dict[str, list[str]] = {}
    for key in tensors:
        parts = key.split(".")
        kinds.setdefault(".".join(parts[: 2 if parts[0] == "optimizer" else 1]), []).append(key)
    return list(kinds.values())


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch
    from torch.distributed.tensor import DTensor

    locals_ = [t.detach().to_local() if isinstance(t, DTensor) else t for t in (left, right)]
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in locals_)
    return torch.equal(a, b)


def _commit(partial: Path, final: Path, meta: CheckpointMeta, fence: Fence | None) -> None:
    write_durably(
        partial / META_FILE, (json.dumps(asdict(meta), indent=1, sort_keys=True) + "\n").encode()
    )
    with fence.hold() if fence is not None else nullcontext():
        replaced = final.with_name(final.name + REPLACED_SUFFIX)
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            os.replace(final, replaced)
        os.replace(partial, final)
        sync_folder(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def _has_ranks() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _gathered(value: Any) -> list[Any]:
    import torch.distributed as dist

    if not _has_ranks() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _once(action: Callable[[], None]) -> None:
    """Run on rank 0 while the others wait; its error is raised on all of them."""
    import torch.distributed as dist

    error: LockstepError | OSError | None = None
    if not _has_ranks() or dist.get_rank() == 0:
        try:
            action()
        except (LockstepError, OSError) as caught:
            error = caught
    error = _gathered(error)[0]
    if error is not None:
        raise error
