"""The first checkpoint of a fork: its parent's state, under the fork's own trajectory.

The files are linked where the disk allows it, else copied, so that the fork can be resumed and
forked after its parent was deleted. A checkpoint's files are never changed in place, hence a link
is as good as a copy. Invariant: the state is the one that the fork's origin names, or nothing is
taken. Imports no torch.

    adopt_checkpoint(Path(origin.checkpoint), target, origin=origin, trajectory=key, fence=fence)
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

from engines.checkpoint.dcp import META_FILE, PARTIAL_SUFFIX, CheckpointMeta, read_meta
from engines.provenance.fence import Fence, sync_folder, write_durably
from model_specs.errors import CheckpointError
from model_specs.run_spec import ForkOrigin


def adopt_checkpoint(
    source: Path, target: Path, *, origin: ForkOrigin, trajectory: str, fence: Fence
) -> CheckpointMeta:
    """Make the checkpoint at `target` from the parent's at `source`; return its meta.

    Args:
        source: Committed checkpoint of the parent.
        target: The fork's checkpoint; one that is there already is replaced.
        origin: What the fork's spec says it begins with.
        trajectory: Fingerprint of the fork.
        fence: The fork's attempt.

    Raises:
        CheckpointError: `source` is torn, or is not the state of `origin`.
        StaleAttemptError: A newer attempt of the fork has started.
    """
    found = read_meta(source)
    if (found.step, found.state_digest) != (origin.step, origin.state_digest):
        raise CheckpointError(
            f"{source} holds step {found.step}, state {found.state_digest}, but the fork begins "
            f"with step {origin.step}, state {origin.state_digest}; fork again"
        )
    meta = replace(found, trajectory=trajectory, attempt=fence.token)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source, partial, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(META_FILE)
    )
    content = json.dumps(asdict(meta), indent=1, sort_keys=True) + "\n"
    write_durably(partial / META_FILE, content.encode())
    with fence.hold():
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        sync_folder(target.parent)
    return meta


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
