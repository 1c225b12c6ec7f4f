"""Commit the trainer's state: written aside, verified, renamed."""

from __future__ import annotations

from engines.contracts import ArtifactRef, SegmentResult
from model_specs.errors import CheckpointError
from tasks.session import session
from tasks.stage import stage


@stage("checkpoint", version=1)
def checkpoint(session_name: str, segment: SegmentResult) -> ArtifactRef:
    """Save the state at the end of `segment`; refuses any other state."""
    opened = session(session_name)
    trainer, _, _ = opened.engines()
    held = trainer.state_digest()
    if held != segment.state_digest:
        raise CheckpointError(
            f"checkpoint of step {segment.end_step}: the trainer holds state {held}, but the "
            f"segment ended with {segment.state_digest}; train again from the last checkpoint"
        )
    opened.fence.check()
    folder = opened.folder / "checkpoints" / f"step-{segment.end_step:06d}"
    trainer.save(
        folder,
        chain_digest=segment.chain_digest,
        attempt=opened.fence.token,
        run_folder=opened.run_dir,
    )
    return ArtifactRef(uri=str(folder), kind="checkpoint", digest=segment.state_digest)
