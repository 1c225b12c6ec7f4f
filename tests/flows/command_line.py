"""Runs the `lockstep` command as a user does: a process of its own, its own folders, real engines.

What a run leaves behind is found by the mark that its guard puts into the environment of every
process that it starts, never by a name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from engines import guard

ROOT = Path(__file__).resolve().parents[2]
LOCKSTEP = Path(sys.executable).with_name("lockstep")
SHORT = tuple(
    part
    for gate in ("layerwise", "controls", "preflight")
    for part in ("--set", f"plan.gates.{gate}=off")
)
"""Leaves out what costs a test time and is not its point."""

_FOREIGN = ("RAY_ADDRESS", "PREFECT_API_URL", "MLFLOW_TRACKING_URI", guard.MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended."""

    arguments: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        """Show all of it, for the message of a failed assertion."""
        return (
            f"lockstep {' '.join(self.arguments)} ended with {self.code}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def clean_environment(prefect_home: Path, **more: str) -> dict[str, str]:
    """The environment of a fresh shell: no server of anybody's, and no mark of this process."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    # Rich wraps and colours by these.
    return {**kept, "PREFECT_HOME": str(prefect_home), "NO_COLOR": "1", "COLUMNS": "200", **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Starts `lockstep` with one folder of runs."""

    runs_dir: Path
    environment: Mapping[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and return at once."""
        return subprocess.Popen(
            [str(LOCKSTEP), *arguments, "--runs-dir", str(self.runs_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(self.environment),
            cwd=ROOT,
        )

    def __call__(self, *arguments: str) -> Ended:
        """Run a command to its end."""
        return finished(self.start(*arguments), *arguments)


def finished(process: subprocess.Popen[str], *arguments: str) -> Ended:
    """Wait for a started command."""
    try:
        stdout, stderr = process.communicate(timeout=540)
    except BaseException:
        process.kill()
        raise
    return Ended(arguments=arguments, code=process.returncode, stdout=stdout, stderr=stderr)


def mark_of(driver: psutil.Process) -> str:
    """The mark that the driver's guard has put on all processes of its run."""
    for child in driver.children(recursive=True):
        try:
            mark = child.environ().get(guard.MARK)
        except psutil.Error:  # gone meanwhile
            continue
        if mark:
            return mark
    raise AssertionError(f"no process under pid {driver.pid} carries {guard.MARK}")


def wait_until(condition: Callable[[], object], *, seconds: float, what: str) -> None:
    """Look ten times a second until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def is_alive(pid: int, started_at: float) -> bool:
    """Whether this process still runs; a new one with the number of an ended one does not count."""
    try:
        process = psutil.Process(pid)
        # The recorded time is taken inside the process, after the operating system's.
        return process.create_time() <= started_at and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
