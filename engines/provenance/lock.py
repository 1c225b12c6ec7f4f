"""The lock of a leg: one row a stage, with what went in, what came out, and under which identity.

    append_row(folder, LockRow(stage="convert", version=1, inputs={"model": d0}, ...))
    compare_outputs(read_lock(folder), made_again)

Invariants: rows are in the order in which stages ended and are never rewritten; what a stage made
is compared with what it makes when it is run again (`lockstep verify`); what is under `ambient`
(times, places) is recorded and never compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """One output of a locked stage, and what was found when it was looked at or made again."""

    stage: str
    """With its steps, where it has any: `train 1-4`."""
    output: str
    locked: str
    found: str | None
    """Digest, or why there is none; None where the stage was not reached."""

    @property
    def is_equal(self) -> bool:
        """Whether both digests are the same."""
        return self.found == self.locked

    def __str__(self) -> str:
        """Say it with both digests."""
        return f"stage {self.stage}: {self.output}: locked {self.locked}, found {self.found}"


def stage_name(row: LockRow) -> str:
    """Return the stage with the steps that it is about: a run has several segments."""
    steps = row.ambient.get("steps")
    if steps is None:
        return row.stage
    first, last = steps
    return f"{row.stage} {last}" if row.stage == "checkpoint" else f"{row.stage} {first + 1}-{last}"


def final_rows(rows: Sequence[LockRow]) -> dict[str, LockRow]:
    """Return stage name -> its last row, in order: a later attempt stands for an earlier one."""
    return {stage_name(row): row for row in rows}


def compare_outputs(locked: Sequence[LockRow], again: Sequence[LockRow]) -> tuple[StageOutput, ...]:
    """Compare the outputs of every locked stage with those of a pipeline that was run again."""
    remade = final_rows(again)
    return tuple(
        StageOutput(
            stage=name,
            output=output,
            locked=digest,
            found=remade[name].outputs.get(output) if name in remade else None,
        )
        for name, row in final_rows(locked).items()
        for output, digest in sorted(row.outputs.items())
    )
