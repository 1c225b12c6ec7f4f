"""Export a checkpoint as an HF folder, and prove that it is the trained weights."""

from __future__ import annotations

import shutil

from engines.cluster import gather
from engines.contracts import ArtifactRef
from engines.provenance.digest import root_digest
from tasks.session import session
from tasks.stage import stage


@stage("export", version=1)
def export(session_name: str, source: ArtifactRef, model: ArtifactRef) -> ArtifactRef:
    """Write `export/` from a checkpoint; names, dtypes, tie and digests are checked on reload."""
    opened = session(session_name)
    target = opened.folder / "export"
    shutil.rmtree(target, ignore_errors=True)
    (digests,) = gather(
        [
            opened.trainer_hosts[0].run(
                "engines.checkpoint.export:export_checkpoint",
                source.uri,
                target,
                model.uri,
                opened.spec.model,
                dtype=opened.spec.numerics.compute_dtype,
            )
        ],
        what="export",
    )
    return ArtifactRef(uri=str(target), kind="export", digest=root_digest(digests))
