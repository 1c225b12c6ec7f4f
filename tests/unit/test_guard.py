"""When a driver dies without cleaning up, what it started is ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engines import guard
from model_specs.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = guard.GRACE_S + guard.TERMINATE_S + 15

DRIVER = """
import subprocess, sys, time
from engines import guard
token = guard.start()
assert guard.start() == token
sleep = "import time; time.sleep(600)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); "
children = [
    subprocess.Popen([sys.executable, "-c", deaf + sleep], stdout=subprocess.PIPE),
    subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True),
]
children[0].stdout.readline()
print(token, *(child.pid for child in children), flush=True)
time.sleep(600)
"""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != guard.MARK}
    return {**kept, **more}


@contextmanager
def sleeper(**more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that this test has started itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=environment(**more)
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if not is_gone(p)]}"
        time.sleep(0.1)


@pytest.fixture
def driver() -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A driver with a deaf child and one in a session of its own; its mark and their pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    token, *pids = process.stdout.readline().split()
    children = [int(pid) for pid in pids]
    yield process, token, children
    process.kill()
    process.wait()
    process.stdout.close()
    for pid in children:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_after_kill_9_marked_processes_are_ended_and_others_are_not(
    driver: tuple[subprocess.Popen[str], str, list[int]],
) -> None:
    process, token, children = driver
    with sleeper() as unmarked, sleeper(**{guard.MARK: "0" * 32}) as marked_by_another:
        members = {member.pid for member in guard.marked_processes(token)}
        assert set(children) <= members
        watcher = members - set(children)
        assert len(watcher) == 1, "one watcher, although start() was called twice"
        assert not {unmarked.pid, marked_by_another.pid, process.pid, os.getpid()} & members
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for([*children, *watcher])
        assert unmarked.poll() is None
        assert marked_by_another.poll() is None


def test_nothing_is_ended_while_the_driver_lives(
    driver: tuple[subprocess.Popen[str], str, list[int]],
) -> None:
    process, _, children = driver
    time.sleep(guard.GRACE_S + 1)
    assert process.poll() is None
    assert not any(map(is_gone, children))


def test_a_hidden_process_that_was_seen_once_is_ended_although_its_parent_went_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = uuid.uuid4().hex
    looked = threading.Event()
    real = guard.marked_processes

    def spied(asked: str) -> list[psutil.Process]:
        found = real(asked)
        if found:
            looked.set()
        return found

    monkeypatch.setattr(guard, "marked_processes", spied)
    monkeypatch.setattr(guard, "GRACE_S", 0.1)
    read_end, write_end = os.pipe()
    watcher = threading.Thread(target=guard.watch, args=(read_end, token))
    with parent_of_a_hidden_child(token) as (parent, child), sleeper() as other:
        watcher.start()
        os.write(write_end, b".")
        assert looked.wait(timeout=30)
        parent.kill()
        parent.wait()
        assert real(token) == [], "by now the child cannot be found any more"
        assert not is_gone(child)
        os.close(write_end)
        watcher.join(timeout=LIMIT_S)
        assert is_gone(child)
        assert other.poll() is None
    os.close(read_end)


def test_a_hidden_process_is_ended_even_after_its_marked_parent() -> None:
    token = uuid.uuid4().hex
    with parent_of_a_hidden_child(token) as (parent, child):
        assert {member.pid for member in guard.marked_processes(token)} == {parent.pid, child}
        guard.end_marked(token)
        assert is_gone(parent.pid)
        assert is_gone(child)


@contextmanager
def parent_of_a_hidden_child(token: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A marked process with an unmarked child that does not listen to SIGTERM, and the child's pid.

    So looks a daemon that has overwritten the environment that others can read.
    """
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(flush=True); time.sleep(600)"
    )
    program = (
        "import os, subprocess, sys, time\n"
        f"kept = {{n: v for n, v in os.environ.items() if n != {guard.MARK!r}}}\n"
        f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], env=kept, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**{guard.MARK: token}),
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        yield parent, child
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if not is_gone(child):
            os.kill(child, signal.SIGKILL)


def test_the_watcher_lives_also_where_the_driver_has_a_thousand_files_open() -> None:
    """`select` takes no descriptor above 1023, and a driver with many files has only such."""
    program = (
        "import os, resource, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
        "from engines import guard\n"
        "guard.start()\n"
        "time.sleep(2)\n"
        "guard.look()\n"
        "time.sleep(0.5)\n"
        "guard.look()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_watcher_that_has_ended_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setattr(guard, "_OWNED", ["token", write_end])
    with pytest.raises(EngineError, match="has itself ended"):
        guard.look()
    os.close(write_end)
