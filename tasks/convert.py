"""HF safetensors to a distributed checkpoint; the config is checked against the ModelSpec first."""

from __future__ import annotations

from engines.cluster import gather_work
from engines.contracts import ArtifactRef
from engines.provenance.digest import root_digest
from tasks.session import session
from tasks.stage import stage


@stage("convert", version=1)
def convert(session_name: str, model: ArtifactRef) -> ArtifactRef:
    """Convert bitwise; the result's digest is the root of the float32 masters' digests.

    A folder that an earlier attempt of this leg converted is read back instead of written again.
    """
    opened = session(session_name)
    target = opened.folder / "dcp"
    opened.stage_reused = target.is_dir()
    function = "digest_dcp_model" if opened.stage_reused else "convert_hf_to_dcp"
    arguments = (target,) if opened.stage_reused else (model.uri, target)
    (digests,) = gather_work(
        [
            opened.trainer_hosts[0].run(
                f"engines.checkpoint.convert:{function}", *arguments, opened.spec.model
            )
        ],
        what="conversion of the model",
        execution=opened.spec.execution,
    )
    return ArtifactRef(uri=str(target), kind="dcp", digest=root_digest(digests))
