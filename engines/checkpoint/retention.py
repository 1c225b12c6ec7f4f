"""Which checkpoints a run keeps, what it needs on disk, and deleting the others.

`plan.keep_last` newest are kept, and every one whose step `plan.keep_every` divides; without
`keep_last` all are. Invariant: a checkpoint is deleted only after a newer one was committed, never
the one that the attempt went on from, and never half: its `meta.json` goes first, so that a crash
leaves a folder that counts as torn. Imports no torch.

    need = disk_need(spec, start_step=0, num_legs=2)
    require_disk(need, runs_dir)                       # before anything starts
    prune(leg_folder, plan, newest_step=8, protected={4}, fence=fence)
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from engines.checkpoint.dcp import META_FILE, checkpoint_name
from engines.plan import segment_stops
from engines.provenance.fence import Fence, sync_folder
from model_specs.errors import SpecError
from model_specs.families.decoder import parameter_shapes
from model_specs.model_spec import ModelSpec
from model_specs.run_spec import PlanSpec, RunSpec

logger = logging.getLogger("lockstep")

BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the float32 master and AdamW's two float32 moments."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """What the tensors of a run need at most, by estimate."""

    bytes_per_checkpoint: int
    num_checkpoints: int
    """Most that are there at once in one leg, the one that is being written included."""
    bytes_of_copies: int
    """Of one leg: the model as it came, converted and exported, and the kept tensors of steps."""
    num_legs: int

    @property
    def total(self) -> int:
        """Bytes of all legs."""
        return (self.bytes_per_checkpoint * self.num_checkpoints + self.bytes_of_copies) * (
            self.num_legs
        )

    def __str__(self) -> str:
        """Say how the total comes about."""
        legs = f", x {self.num_legs} legs" if self.num_legs > 1 else ""
        return (
            f"{self.total / MIB:.1f} MiB ({self.num_checkpoints} checkpoints of "
            f"{self.bytes_per_checkpoint / MIB:.1f} MiB, {self.bytes_of_copies / MIB:.1f} MiB of "
            f"model copies and kept tensors{legs})"
        )


def num_parameters(model: ModelSpec) -> int:
    """Return the number of trained values."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def checkpoint_bytes(model: ModelSpec) -> int:
    """Return the bytes of the tensors of one checkpoint."""
    return BYTES_PER_PARAMETER * num_parameters(model)


def copy_bytes(spec: RunSpec, *, num_steps: int) -> int:
    """Return the bytes of a leg's tensors that are not in checkpoints.

    Per parameter: `model/` in the stored dtype, `dcp/` in float32, `export/` in the compute dtype;
    and in each of the last `plan.keep_tensor_steps` steps gradient, moments and weight of every
    update in float32, and what was sent and received in the compute dtype.

    Args:
        spec: Says dtypes, updates a step and how many steps' tensors are kept.
        num_steps: Steps of the leg.
    """
    stored, wire = DTYPE_BYTES[spec.model.dtype], DTYPE_BYTES[spec.numerics.compute_dtype]
    of_step = 16 * spec.loss.updates_per_step + 2 * wire
    kept = min(spec.plan.keep_tensor_steps, num_steps)
    return num_parameters(spec.model) * (stored + 4 + wire + kept * of_step)


def kept_steps(steps: Iterable[int], plan: PlanSpec) -> frozenset[int]:
    """Return which of the committed `steps` the plan keeps."""
    ordered = sorted(steps)
    if plan.keep_last is None:
        return frozenset(ordered)
    kept = set(ordered[-plan.keep_last :])
    if plan.keep_every is not None:
        kept |= {step for step in ordered if step % plan.keep_every == 0}
    return frozenset(kept)


def disk_need(spec: RunSpec, *, start_step: int, num_legs: int = 1) -> DiskNeed:
    """Return what the steps after `start_step` need, and with the first of them all copies.

    Of checkpoints: the kept ones and the one being written. A leg that is resumed has its copies
    already.
    """
    held = frozenset({start_step} if start_step else ())
    most = 0
    for step in segment_stops(spec.plan, start_step):
        committed = held | {step}
        most = max(most, len(committed))
        # The checkpoint that the attempt went on from is never deleted.
        held = kept_steps(committed, spec.plan) | ({start_step} & committed)
    return DiskNeed(
        bytes_per_checkpoint=checkpoint_bytes(spec.model),
        num_checkpoints=most - (1 if start_step else 0),
        bytes_of_copies=copy_bytes(spec, num_steps=spec.plan.num_steps - start_step)
        if start_step == spec.start_step
        else 0,
        num_legs=num_legs,
    )


def half_need(spec: RunSpec, *, trained_steps: int) -> DiskNeed:
    """Return what one half of a run needs alone: it commits no checkpoint.

    Args:
        spec: Says dtypes and how many steps' tensors are kept.
        trained_steps: Steps that are trained; 0 where they are only drawn, and no tensor is kept.
    """
    return DiskNeed(
        bytes_per_checkpoint=checkpoint_bytes(spec.model),
        num_checkpoints=0,
        bytes_of_copies=copy_bytes(spec, num_steps=trained_steps),
        num_legs=1,
    )


def require_disk(need: DiskNeed, runs_dir: str | Path) -> None:
    """State the need, and refuse it where the disk of `runs_dir` has less.

    Raises:
        SpecError: With both values.
    """
    place = Path(runs_dir).resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    logger.info("the run needs %s, %.1f MiB are free", need, free / MIB)
    if need.total > free:
        raise SpecError(
            f"the run needs {need}, but {place} has {free / MIB:.1f} MiB free; keep fewer "
            "checkpoints (plan.keep_last), save them more seldom (plan.checkpoint_every), keep "
            "fewer tensors (plan.keep_tensor_steps), or name another --runs-dir"
        )


def prune(
    leg_folder: str | Path,
    plan: PlanSpec,
    *,
    newest_step: int,
    protected: Collection[int],
    fence: Fence,
) -> tuple[int, ...]:
    """Delete the committed checkpoints that the plan does not keep; return their steps.

    Args:
        leg_folder: Folder of the leg.
        plan: Says which are kept.
        newest_step: The checkpoint that was just committed; later ones, which an attempt that was
            taken back left behind, neither count nor go.
        protected: Steps that are kept in any case.
        fence: A stale attempt deletes nothing.

    Raises:
        StaleAttemptError: A newer attempt of the run has started.
    """
    root = Path(leg_folder) / "checkpoints"
    # Neither one that is being written, nor one that was replaced, nor a copy.
    names = [path.parent.name.removeprefix("step-") for path in root.glob(f"step-*/{META_FILE}")]
    committed = [
        int(name)
        for name in names
        if name.isdecimal()
        and int(name) <= newest_step
        and checkpoint_name(int(name)) == f"step-{name}"
    ]
    unwanted = sorted(set(committed) - kept_steps(committed, plan) - {*protected, newest_step})
    for step in unwanted:
        folder = root / checkpoint_name(step)
        with fence.hold():
            (folder / META_FILE).unlink()
            sync_folder(folder)
        shutil.rmtree(folder)
    return tuple(unwanted)
