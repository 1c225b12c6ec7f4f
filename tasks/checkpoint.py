"""Commit the trainer's state, delete what the plan does not keep, and take over a fork's origin.

A checkpoint is written aside, verified and renamed; see `engines.checkpoint`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engines.checkpoint.adoption import adopt_checkpoint
from engines.checkpoint.dcp import checkpoint_name
from engines.checkpoint.retention import prune
from engines.contracts import ArtifactRef, SegmentResult
from model_specs.errors import CheckpointError
from model_specs.fingerprint import trajectory_fingerprint
from tasks.session import session
from tasks.stage import stage

logger = logging.getLogger("lockstep")


@stage("checkpoint", version=1)
def checkpoint(session_name: str, segment: SegmentResult) -> ArtifactRef:
    """Save the state at the end of `segment`; refuses any other state."""
    opened = session(session_name)
    trainer = opened.trainer_alone()
    held = trainer.state_digest()
    if held != segment.state_digest:
        raise CheckpointError(
            f"checkpoint of step {segment.end_step}: the trainer holds state {held}, but the "
            f"segment ended with {segment.state_digest}; train again from the last checkpoint"
        )
    opened.fence.check()
    folder = opened.folder / "checkpoints" / checkpoint_name(segment.end_step)
    trainer.save(
        folder,
        chain_digest=segment.chain_digest,
        attempt=opened.fence.token,
        run_folder=opened.run_dir,
    )
    deleted = prune(
        opened.folder,
        opened.spec.plan,
        newest_step=segment.end_step,
        protected={opened.start_from},
        fence=opened.fence,
    )
    if deleted:
        logger.info("%s deleted the checkpoints of steps %s", opened.leg, list(deleted))
    return ArtifactRef(uri=str(folder), kind="checkpoint", digest=segment.state_digest)


@stage("adopt", version=1)
def adopt(session_name: str) -> ArtifactRef:
    """Take the state that a fork begins with into the fork's own folder."""
    opened = session(session_name)
    origin = opened.spec.origin
    assert origin is not None
    target = opened.folder / "checkpoints" / checkpoint_name(origin.step)
    adopt_checkpoint(
        Path(origin.checkpoint),
        target,
        origin=origin,
        trajectory=trajectory_fingerprint(opened.spec),
        fence=opened.fence,
    )
    return ArtifactRef(uri=str(target), kind="checkpoint", digest=origin.state_digest)
