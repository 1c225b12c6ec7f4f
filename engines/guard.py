"""Ends whatever a run left behind when its driver dies without cleaning up, as by kill -9.

The driver marks its own environment with a fresh token, which every process it starts inherits:
Ray's daemons and workers, engines, a temporary Prefect server. A watcher process holds the read end
of a pipe; when the driver is gone, for whatever reason, the pipe closes, and after a short grace
the watcher ends every process that still carries the token. Nothing is ever ended by name.

A daemon that sets its own title may hide its environment, and is an orphan when the daemon that
started it has ended first. So the watcher looks while the driver lives, whenever `look` asks it to
and from time to time, and remembers what it found.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from model_specs.errors import EngineError

MARK = "LOCKSTEP_RUN_MARK"
GRACE_S = 3.0
TERMINATE_S = 5.0
LOOK_EVERY_S = 15.0


def start() -> str:
    """Mark this process and start its watcher; return the token. A second call changes nothing."""
    if _OWNED:
        return _OWNED[0]
    token = uuid.uuid4().hex
    os.environ[MARK] = token
    read_end, write_end = os.pipe()
    subprocess.Popen(
        [sys.executable, "-m", "engines.guard", token],
        # As its input: a number of its own could be beyond what `select` takes.
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    os.close(read_end)
    _OWNED.extend((token, write_end))
    return token


_OWNED: list[Any] = []
"""Token and write end of the pipe; the end stays open for as long as the driver lives."""


def look() -> None:
    """Let the watcher take note of all processes that run now; call it when some were started."""
    if _OWNED:
        try:
            os.write(_OWNED[1], b".")
        except BrokenPipeError as error:
            raise EngineError(
                "the process that watches over this run has itself ended (was it killed?), so that "
                "engines could be left behind; start the run again"
            ) from error


def marked_processes(token: str) -> list[psutil.Process]:
    """All living processes that carry the token, and their descendants, apart from this one.

    Descendants count because a process that sets its title may overwrite its environment.
    """
    parents: dict[int, int] = {}
    living: dict[int, psutil.Process] = {}
    members: set[int] = set()
    for process in psutil.process_iter():
        try:
            parents[process.pid] = process.ppid()
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            living[process.pid] = process
            if process.environ().get(MARK) == token:
                members.add(process.pid)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    found = [living[pid] for pid in living if members.intersection(_line_of(pid, parents))]
    return [process for process in found if process.pid != os.getpid()]


def _line_of(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """Yield a process, its parent, and so on to the first one."""
    seen = set()
    while pid not in seen:
        seen.add(pid)
        yield pid
        pid = parents.get(pid, pid)


def end_marked(token: str, known: Iterable[psutil.Process] = ()) -> None:
    """Ask all marked processes, and those that are known already, to end; then end them.

    What was once found is followed by its process, for a descendant that does not carry the token
    itself can no longer be found when its parent has ended before it.
    """
    found = set(known)
    for sign, patience in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, TERMINATE_S)):
        for process in _still_there(found, token):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sign)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not _still_there(found, token):
                return
            time.sleep(0.2)


def _still_there(found: set[psutil.Process], token: str) -> list[psutil.Process]:
    """Add what carries the token now, and return what of all that was found has not ended."""
    found.update(marked_processes(token))
    return [process for process in found if _has_not_ended(process)]


def _has_not_ended(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def watch(read_end: int, token: str) -> None:
    """Wait until the other end of the pipe is closed everywhere, then clean up."""
    known: set[psutil.Process] = set()
    gone = False
    while not gone:
        ready, _, _ = select.select([read_end], [], [], LOOK_EVERY_S)
        gone = bool(ready) and not os.read(read_end, 4096)
        known = set(_still_there(known, token))
    time.sleep(GRACE_S)
    end_marked(token, known)


if __name__ == "__main__":
    os.environ.pop(MARK, None)
    watch(sys.stdin.fileno(), sys.argv[1])
