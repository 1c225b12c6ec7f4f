"""Export a checkpoint as an HF folder, and prove that it is the trained weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from engines import guard
from engines.cluster import Cluster, gather_work
from engines.contracts import ArtifactRef
from engines.provenance.digest import root_digest
from engines.train.group import trainer_env
from model_specs.errors import ArtifactError, SpecError
from model_specs.run_spec import RunSpec
from tasks.session import session
from tasks.stage import stage

EXPORT_CHECKPOINT = "engines.checkpoint.export:export_checkpoint"


@stage("export", version=1)
def export(session_name: str, source: ArtifactRef, model: ArtifactRef) -> ArtifactRef:
    """Write `export/` from a checkpoint; names, dtypes, tie and digests are checked on reload."""
    opened = session(session_name)
    target = opened.folder / "export"
    shutil.rmtree(target, ignore_errors=True)
    (digests,) = gather_work(
        [
            opened.trainer_hosts[0].run(
                EXPORT_CHECKPOINT,
                source.uri,
                target,
                model.uri,
                opened.spec.model,
                dtype=opened.spec.numerics.compute_dtype,
            )
        ],
        what="export",
        execution=opened.spec.execution,
    )
    return ArtifactRef(uri=str(target), kind="export", digest=root_digest(digests))


@task(name="export", retries=0, cache_policy=NO_CACHE, persist_result=False)
def export_alone(
    spec: RunSpec, checkpoint: ArtifactRef, *, model: Path, target: Path
) -> ArtifactRef:
    """Export a checkpoint in a process of its own, without a leg and its engines.

    Args:
        spec: Spec of the run.
        checkpoint: Committed checkpoint.
        model: Folder with config and tokenizer.
        target: New folder.

    Raises:
        SpecError: `target` is there already.
        ArtifactError: The leg has no model folder.
    """
    if target.exists():
        raise SpecError(f"{target} is there already; name another folder by --out, or remove it")
    if not model.is_dir():
        raise ArtifactError(f"{model} does not exist, so config and tokenizer are missing")
    guard.start()
    target.parent.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(
        f"export-{target.name}", num_cpus=1, object_store_mib=spec.execution.object_store_mib
    )
    with cluster:
        host = cluster.start("export-0", env=trainer_env(spec), num_cpus=1)
        (digests,) = gather_work(
            [
                host.run(
                    EXPORT_CHECKPOINT,
                    checkpoint.uri,
                    target,
                    str(model),
                    spec.model,
                    dtype=spec.numerics.compute_dtype,
                )
            ],
            what="export",
            execution=spec.execution,
        )
    return ArtifactRef(uri=str(target), kind="export", digest=root_digest(digests))
