"""A Prefect server with the shipped deployments and a worker, on a port and database of its own.

Ended by process id; nothing of it is shared with any server of the machine's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.environment import telemetry_off_env
from tests.flows.command_line import ROOT, clean_environment, wait_until

PREFECT = Path(sys.executable).with_name("prefect")
SHORTEST = {
    "plan.num_steps": 2,
    "plan.gates.layerwise": "off",
    "plan.gates.controls": "off",
    "plan.gates.preflight": "off",
}
"""Overrides of the shortest night: it resumes from a checkpoint in the middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A Prefect server with the shipped deployments and a worker."""

    url: str
    folder: Path
    environment: Mapping[str, str]

    def prefect(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run the Prefect command line against this server."""
        return subprocess.run(
            [str(PREFECT), "--no-prompt", *arguments],
            capture_output=True,
            text=True,
            env=dict(self.environment),
            cwd=ROOT,
            timeout=timeout,
            check=False,
        )

    def ask(self, path: str, query: Mapping[str, Any]) -> Any:
        """Ask the server's API."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(query).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def ask_for(
        self, deployment: str, request: Any, *flags: str, timeout: float = 120, **parameters: Any
    ) -> subprocess.CompletedProcess[str]:
        """Ask for a run of a deployment as a user does."""
        given = {"request": request, "runs_dir": str(self.folder / "runs"), **parameters}
        named = [
            part
            for key, value in given.items()
            for part in ("--param", f"{key}={json.dumps(value)}")
        ]
        return self.prefect("deployment", "run", deployment, *named, *flags, timeout=timeout)

    def watch_nightly(self, run_id: str, **request: Any) -> tuple[int, dict[str, Any]]:
        """Run `nightly/tiny-cpu` and watch it; returns the exit code and the flow run."""
        asked = {"recipe": "tiny_cpu", "overrides": SHORTEST, **request}
        watched = self.ask_for("nightly/tiny-cpu", asked, "--watch", timeout=540, run_id=run_id)
        found = re.search(r"UUID: (\S+)", watched.stdout)
        assert found is not None, watched
        (flow_run,) = self.ask("/flow_runs/filter", {"flow_runs": {"id": {"any_": [found[1]]}}})
        return watched.returncode, flow_run

    def num_runs(self) -> int:
        """How many flow runs there are that nobody scheduled."""
        return sum(not run["auto_scheduled"] for run in self.ask("/flow_runs/filter", {}))

    def logs(self, flow_run: Mapping[str, Any]) -> str:
        """All that a flow run has logged, one message a line."""
        query = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "sort": "TIMESTAMP_ASC"}
        return "\n".join(line["message"] for line in self.ask("/logs/filter", query))

    def artifacts(self, flow_run: Mapping[str, Any]) -> dict[str, Any]:
        """Key -> artifact of a flow run."""
        query = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}}}
        return {found["key"]: found for found in self.ask("/artifacts/filter", query)}


@contextmanager
def in_background(log: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[None]:
    """Run a Prefect command in a process group of its own, and end that group."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(PREFECT), "--no-prompt", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def listening(folder: Path, *flags: str) -> Iterator[dict[str, str]]:
    """Start a server; yields the environment of what is to use it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    url = f"http://127.0.0.1:{port}/api"
    environment = clean_environment(
        folder / "home",
        PREFECT_API_URL=url,
        PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        **telemetry_off_env(),
    )
    start = ("server", "start", "--host", "127.0.0.1", "--port", port, *flags)
    with in_background(folder / "server.log", environment, *start):
        wait_until(lambda: is_healthy(url), seconds=120, what="the Prefect server answers")
        yield environment


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Start a server, deploy the repository's `prefect.yaml` to it, and start a worker."""
    with listening(folder) as environment:
        running = Server(url=environment["PREFECT_API_URL"], folder=folder, environment=environment)
        for arguments in (
            ("work-pool", "create", "--type", "process", "lockstep"),
            ("deploy", "--all"),
        ):
            ended = running.prefect(*arguments)
            assert ended.returncode == 0, ended
        worker = ("worker", "start", "--pool", "lockstep", "--name", "test")
        with in_background(folder / "worker.log", environment, *worker):
            yield running
