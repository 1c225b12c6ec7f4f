"""The lock of a leg: one row a stage, with what went in, what came out, and under which identity.

    append_row(folder, LockRow(stage="convert", version=1, inputs={"model": d0}, ...))
    verify_outputs(folder, recompute=lambda row, name: digest_of_artifact(row.stage, name))

Invariants: rows are in the order in which stages ended and are never rewritten; verification
recomputes digests from the artifacts and never trusts recorded ones; what is under `ambient`
(times, places) is recorded and never compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.provenance.fence import write_durably
from model_specs.errors import ArtifactError

LOCK_SCHEMA_VERSION = 1
LOCK_FILE = "lock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRow:
    """One stage as it ended."""

    stage: str
    version: int
    """Version of the stage's code, raised when its output changes."""
    inputs: Mapping[str, str]
    """Name -> digest."""
    outputs: Mapping[str, str]
    trajectory: str
    """Trajectory fingerprint."""
    attempt: int
    """Token of the attempt that ran it."""
    cached: bool
    """Whether the outputs were reused; refused in a twin."""
    environment: str = ""
    """Environment fingerprint of the working process; empty before engines have started."""
    ambient: Mapping[str, Any] = field(default_factory=dict)


def append_row(folder: str | Path, row: LockRow) -> None:
    """Add a row to the lock of a leg's folder, durably and at once."""
    rows = [*read_lock(folder), row] if (Path(folder) / LOCK_FILE).exists() else [row]
    content = {"schema_version": LOCK_SCHEMA_VERSION, "rows": [asdict(known) for known in rows]}
    encoded = json.dumps(content, indent=1, sort_keys=True) + "\n"
    write_durably(Path(folder) / LOCK_FILE, encoded.encode())


def read_lock(folder: str | Path) -> tuple[LockRow, ...]:
    """Read all rows.

    Raises:
        ArtifactError: no lock, a damaged one, or a schema version that this code does not know.
    """
    path = Path(folder) / LOCK_FILE
    try:
        content = json.loads(path.read_bytes())
        version = content["schema_version"]
        if version != LOCK_SCHEMA_VERSION:
            raise ArtifactError(
                f"{path} has lock schema version {version!r}; this version of Lockstep reads "
                f"{LOCK_SCHEMA_VERSION}: read it with the version that wrote it"
            )
        return tuple(LockRow(**row) for row in content["rows"])
    except FileNotFoundError:
        raise ArtifactError(f"{folder} has no {LOCK_FILE}; no stage has ended there") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path} is damaged: {error!r}") from error


def verify_outputs(
    folder: str | Path, *, recompute: Callable[[LockRow, str], str]
) -> tuple[LockRow, ...]:
    """Recompute the digest of every output and compare.

    Args:
        folder: The leg's folder.
        recompute: Row and output name -> digest, from the artifact itself.

    Raises:
        ArtifactError: naming every output that is not what the lock says, with both digests.
    """
    rows = read_lock(folder)
    wrong = [
        f"{row.stage} {name}: locked {recorded}, found {found}"
        for row in rows
        for name, recorded in row.outputs.items()
        if (found := recompute(row, name)) != recorded
    ]
    if wrong:
        raise ArtifactError(
            f"{Path(folder) / LOCK_FILE}: {len(wrong)} outputs are not what the lock says: "
            f"{'; '.join(wrong)}; run the stage again"
        )
    return rows
