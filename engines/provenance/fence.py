"""The run folder's attempts and their fence: only the newest attempt of a run may write.

`RUN/run.json` holds the run id and the token of the newest attempt; every flow run or retry takes
token n+1. A writer holds the fence while it writes, so that a newer attempt either waits for the
write to end or makes it fail: there is no moment between check and write.

    folder = RunFolder.create(path, run_id="r7")
    fence = folder.new_attempt()
    with fence.hold():
        write_durably(path / "a" / "lock.json", content)

Invariant: two attempts never have the same token, also when they start at once; a writer with an
older token raises `StaleAttemptError` and has written nothing. Locks are `flock`s and go with
their process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_specs.errors import ArtifactError, SpecError, StaleAttemptError

RUN_SCHEMA_VERSION = 1
_RUN_FILE = "run.json"
_LOCK_FILE = ".run.lock"


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file at once: written aside, synced, renamed; a crash leaves the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Fence:
    """The right of one attempt to write into its run; small, and can be sent to an engine."""

    run_folder: str
    token: int

    def check(self) -> None:
        """Raise StaleAttemptError when a newer attempt has started."""
        newest = RunFolder.open(self.run_folder).current_token()
        if newest != self.token:
            raise StaleAttemptError(
                f"attempt {self.token} of {self.run_folder} may not write any more: attempt "
                f"{newest} has started; let it finish, or resume the run from its last checkpoint"
            )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Check, and keep a newer attempt from starting until the block has ended."""
        with _locked(Path(self.run_folder), exclusive=False):
            self.check()
            yield


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder by its path."""

    path: Path

    @classmethod
    def create(cls, path: str | Path, *, run_id: str) -> RunFolder:
        """Make the folder of a new run, before its first attempt.

        Raises:
            SpecError: there is a run in it already.
        """
        folder = cls(Path(path))
        folder.path.mkdir(parents=True, exist_ok=True)
        with _locked(folder.path, exclusive=True):
            if (folder.path / _RUN_FILE).exists():
                raise SpecError(
                    f"{folder.path} already holds run {folder.run_id!r}, so {run_id!r} cannot "
                    "start there; resume it, or choose another folder"
                )
            folder._write({"schema_version": RUN_SCHEMA_VERSION, "run_id": run_id, "attempt": 0})
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an existing run.

        Raises:
            ArtifactError: it has no `run.json`, or one of another schema version.
        """
        folder = cls(Path(path))
        folder._read()
        return folder

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self._read()["run_id"])

    def current_token(self) -> int:
        """Return the newest attempt's token; 0 before the first."""
        return int(self._read()["attempt"])

    def new_attempt(self) -> Fence:
        """Start an attempt: take token n+1, which makes every older attempt stale."""
        with _locked(self.path, exclusive=True):
            values = self._read()
            token = int(values["attempt"]) + 1
            self._write(values | {"attempt": token})
        return Fence(str(self.path.resolve()), token)

    def _read(self) -> dict[str, Any]:
        path = self.path / _RUN_FILE
        try:
            values: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ArtifactError(f"{self.path} is not a run folder: it has no {_RUN_FILE}") from None
        except ValueError as error:
            raise ArtifactError(f"{path} is not JSON: {error}") from error
        version = values.get("schema_version")
        if version != RUN_SCHEMA_VERSION:
            raise ArtifactError(
                f"{path} has schema version {version!r}; this version of Lockstep reads "
                f"{RUN_SCHEMA_VERSION}"
            )
        return values

    def _write(self, values: dict[str, Any]) -> None:
        write_durably(self.path / _RUN_FILE, (json.dumps(values, indent=1) + "\n").encode())


@contextlib.contextmanager
def _locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Hold the run's lock file; its content means nothing."""
    with open(folder / _LOCK_FILE, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
