"""However a run ends, within 30 s none of its processes is left, and no other one was touched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines import guard
from engines.provenance.ledger import read_ledger, verify_ledger
from model_specs.json_text import read_json
from tests.flows.command_line import (
    SHORT,
    CommandLine,
    Ended,
    finished,
    is_alive,
    mark_of,
    wait_until,
)

pytestmark = pytest.mark.slow

LONG = ("--set", "plan.num_steps=500", *SHORT)
LIMIT_S = 30


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to no run."""
    environment = {name: value for name, value in os.environ.items() if name != guard.MARK}
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment
    )
    yield process
    process.kill()
    process.wait()


class Watched:
    """A run in progress, seen from outside: its driver, mark and all processes so far."""

    def __init__(self, lockstep_alone: CommandLine, run_id: str) -> None:
        self.arguments = ("run", "tiny_cpu", "--run-id", run_id, *LONG)
        self.process = lockstep_alone.start(*self.arguments)
        try:
            self._wait_for_steps()
            self.mark = mark_of(psutil.Process(self.process.pid))
            self.members = guard.marked_processes(self.mark)
        except BaseException:
            self.process.kill()
            raise

    def _wait_for_steps(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("a 2/500 "):
                return
        assert self.process.stderr is not None
        pytest.fail(f"no step was taken: {self.process.stderr.read()}")

    def commands(self) -> list[str]:
        """Command lines of all members."""
        return [" ".join(member.cmdline()) for member in self.members if member.is_running()]

    def left(self) -> list[str]:
        """Members that were ever seen, or carry the mark now, and have not ended."""
        found = []
        for member in {*self.members, *guard.marked_processes(self.mark)}:
            try:
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{member.pid} {' '.join(member.cmdline())}")
            except psutil.NoSuchProcess:
                continue
        return found

    def end(self) -> Ended:
        """Wait for the driver."""
        return finished(self.process, *self.arguments)


def assert_none_is_left(watched: Watched) -> None:
    """Within the limit all processes of the run have ended."""
    deadline = time.monotonic() + LIMIT_S
    while left := watched.left():
        assert time.monotonic() < deadline, "\n".join(["still there:", *left])
        time.sleep(0.2)


def assert_has_all_kinds(watched: Watched) -> None:
    """Ray's daemons, both engines and Prefect's server are among the members."""
    commands = watched.commands()
    for kind in ("gcs_server", "raylet", r"ray::Host", "prefect"):
        assert any(re.search(kind, command) for command in commands), (kind, commands)
    assert sum(command.startswith("ray::Host") for command in commands) >= 2


def test_after_success_no_process_is_left(
    lockstep_alone: CommandLine, twin: Ended, twin_folder: Path
) -> None:
    assert twin.code == 0, twin
    legs = read_json(twin_folder / "verdict.json")["legs"]
    recorded = [facts for leg in legs.values() for facts in leg["processes"].values()]
    assert len(recorded) == 4
    wait_until(
        lambda: not any(is_alive(int(f["pid"]), f["started_at"]) for f in recorded),
        seconds=LIMIT_S,
        what=f"the engines of the twin are gone: {recorded}",
    )
    wait_until(
        lambda: not started_under(lockstep_alone),
        seconds=LIMIT_S,
        what="neither Ray's daemons nor Prefect's server are left",
    )


def started_under(lockstep_alone: CommandLine) -> list[psutil.Process]:
    """Living processes whose environment names this command line's Prefect home, as no other does.

    Unlike the mark, which is made inside the command, it is known from outside.
    """
    home = lockstep_alone.environment["PREFECT_HOME"]
    found = []
    for process in psutil.process_iter():
        try:
            inherited = process.environ().get("PREFECT_HOME") == home
            if inherited and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return found


def test_a_killed_engine_ends_the_run_with_20_and_leaves_no_process(
    lockstep_alone: CommandLine, stranger: subprocess.Popen[bytes]
) -> None:
    watched = Watched(lockstep_alone, "engine-killed")
    assert_has_all_kinds(watched)
    assert started_under(lockstep_alone), "the search of the test above finds what is there"
    victim = next(m for m in watched.members if m.cmdline()[0].startswith("ray::Host"))
    victim.kill()
    ended = watched.end()
    assert ended.code == 20, ended
    assert "\nEngineFailure\n" in ended.stdout
    assert "the engine process was lost" in ended.stdout
    assert_none_is_left(watched)
    assert stranger.poll() is None
    details = read_json(lockstep_alone.runs_dir / "engine-killed" / "verdict.json")
    assert details["verdict"] == "EngineFailure"
    assert lockstep_alone("show", "engine-killed").code == 20
    # What was recorded before is whole.
    assert verify_ledger(lockstep_alone.runs_dir / "engine-killed" / "a").last_step >= 2


def test_after_kill_9_of_the_driver_no_process_is_left(
    lockstep_alone: CommandLine, stranger: subprocess.Popen[bytes]
) -> None:
    watched = Watched(lockstep_alone, "driver-killed")
    assert_has_all_kinds(watched)
    os.kill(watched.process.pid, signal.SIGKILL)
    assert watched.process.wait(timeout=10) == -signal.SIGKILL
    assert_none_is_left(watched)
    assert stranger.poll() is None
    assert read_ledger(lockstep_alone.runs_dir / "driver-killed" / "a").last_step >= 2
