"""Checkpoint folders without engines: a whole meta, and no data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engines.checkpoint.dcp import META_FILE, CheckpointMeta


def write_meta(
    folder: Path, step: int, *, state: str, trajectory: str = "t", chain: str = "c"
) -> CheckpointMeta:
    """Make a folder count as the committed checkpoint of a step with this state digest."""
    meta = CheckpointMeta(
        trajectory=trajectory,
        step=step,
        updates=step,
        samples_consumed=32 * step,
        state_digest=state,
        chain_digest=chain,
        attempt=1,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / META_FILE).write_text(json.dumps(asdict(meta)))
    return meta
