"""What a lock says of artifacts that are still there: every digest is computed again from them.

Recorded digests are never trusted. Runs in the session of a scratch leg, whose trainer reads the
checkpoints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engines.cluster import gather_work
from engines.provenance.digest import root_digest
from engines.provenance.ledger import LedgerLine, verify_ledger
from engines.provenance.lock import StageOutput, final_rows, read_lock
from engines.runs import checkpoints
from model_specs.errors import LockstepError
from tasks.session import LegSession, session
from tasks.stage import stage

Found = Callable[[], str]


@stage("artifacts", version=1)
def check_artifacts(session_name: str, source: Path) -> tuple[StageOutput, ...]:
    """Compute the digests of the artifacts in the leg `source` again, and compare with its lock.

    An artifact that is not there any more (or was never kept) is left out: it will be made again.
    """
    opened = session(session_name)
    checks = []
    # Read once: a lock has a row a segment.
    lines = functools.cache(lambda: verify_ledger(source).lines)
    kept = checkpoints(source)
    for name, row in final_rows(read_lock(source)).items():
        steps = row.ambient.get("steps")
        step = int(steps[1]) if steps else None
        for output, digest in sorted(row.outputs.items()):
            if output == "chain" and row.stage == "train" and step is not None:
                found: Found | None = functools.partial(_chain, lines, step)
            elif output == "checkpoint" and step in kept:
                found = functools.partial(_state, opened, kept[step].uri)
            else:
                found = _finder(opened, source, output)
            if found is not None:
                checks.append(
                    StageOutput(stage=name, output=output, locked=digest, found=_digest(found))
                )
    return tuple(checks)


def _digest(found: Found) -> str:
    try:
        return found()
    except LockstepError as error:  # torn or damaged: that is what was found
        return f"{type(error).__name__}: {error}"


def _finder(opened: LegSession, source: Path, output: str) -> Found | None:
    """Return what computes the digest of a folder that a stage made; None where it is not there."""
    folders = {"model": "model", "data": "data", "dcp": "dcp", "export": "export"}
    if output in folders and not (source / folders[output]).is_dir():
        return None
    if output in ("model", "data"):
        return lambda: _download(opened, source / output)
    if output == "dcp":
        return lambda: _root(opened, "convert:digest_dcp_model", source / "dcp", opened.spec.model)
    if output == "export":
        return lambda: _root(opened, "export:digest_export", source / "export")
    return None


def _download(opened: LegSession, folder: Path) -> str:
    (found,) = gather_work(
        [opened.trainer_hosts[0].run("engines.checkpoint.download:verify_download", str(folder))],
        what=f"digest of {folder.name}",
        execution=opened.spec.execution,
    )
    return str(found.digest)


def _root(opened: LegSession, function: str, *arguments: object) -> str:
    digests: Mapping[str, str]
    (digests,) = gather_work(
        [opened.trainer_hosts[0].run(f"engines.checkpoint.{function}", *arguments)],
        what="digest of an artifact",
        execution=opened.spec.execution,
    )
    return root_digest(digests)


def _chain(lines: Callable[[], Sequence[LedgerLine]], step: int) -> str:
    """The chain at the end of a step, from the digests beside the ledger."""
    return [line for line in lines() if line.step <= step][-1].chain


def _state(opened: LegSession, folder: str) -> str:
    trainer = opened.trainer_alone()
    trainer.load(folder)
    return trainer.state_digest()
