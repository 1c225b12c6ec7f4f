"""The shipped deployments work for real: a Prefect server, a process worker, watched nightly runs.

A server, a worker and databases of their own, on a free port; ended by process id.
"""

from __future__ import annotations

import json
import os
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

import pytest

from engines.environment import telemetry_off_env
from tests.flows.command_line import ROOT, clean_environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PREFECT = Path(sys.executable).with_name("prefect")
SHORTEST = ("plan.num_steps=1", "plan.gates.controls=off", "plan.gates.preflight=off")


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

    def watch_nightly(self, name: str, **parameters: Any) -> tuple[int, dict[str, Any]]:
        """Run `nightly/tiny-cpu` and watch it; returns the exit code and the flow run."""
        given = {"overrides": SHORTEST, "runs_dir": str(self.folder / "runs"), "run_id": name}
        flags = [
            part
            for key, value in {**given, **parameters}.items()
            for part in ("--param", f"{key}={json.dumps(value)}")
        ]
        watched = self.prefect(
            *("deployment", "run", "nightly/tiny-cpu"), *flags, "--watch", timeout=420
        )
        # The flow names its own runs, so that this one is found by its parameter.
        known = self.ask("/flow_runs/filter", {})
        found = [flow_run for flow_run in known if flow_run["parameters"]["run_id"] == name]
        assert len(found) == 1, watched
        return watched.returncode, found[0]

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server to which the repository's `prefect.yaml` was deployed, and a worker of its pool."""
    folder = tmp_path_factory.mktemp("deployment")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    url = f"http://127.0.0.1:{port}/api"
    database = f"sqlite+aiosqlite:///{folder / 'prefect.db'}"
    environment = clean_environment(
        folder / "home",
        PREFECT_API_URL=url,
        PREFECT_API_DATABASE_CONNECTION_URL=database,
        **telemetry_off_env(),
    )
    running = Server(url=url, folder=folder, environment=environment)
    start = ("server", "start", "--host", "127.0.0.1", "--port", port)
    with in_background(folder / "server.log", environment, *start):
        wait_until(lambda: is_healthy(url), seconds=120, what="the Prefect server answers")
        for arguments in (
            ("work-pool", "create", "--type", "process", "lockstep"),
            ("deploy", "--all"),
        ):
            ended = running.prefect(*arguments)
            assert ended.returncode == 0, ended
        worker = ("worker", "start", "--pool", "lockstep", "--name", "test")
        with in_background(folder / "worker.log", environment, *worker):
            yield running


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except OSError:
        return False


def test_all_shipped_deployments_are_there_and_only_one_nightly_runs_at_a_time(
    server: Server,
) -> None:
    flows = {flow["id"]: flow["name"] for flow in server.ask("/flows/filter", {})}
    deployed = {
        f"{flows[found['flow_id']]}/{found['name']}": found
        for found in server.ask("/deployments/filter", {})
    }
    assert set(deployed) == {
        "nightly/tiny-cpu",
        "nightly/gsm8k-smollm2-135m",
        "train/tiny-cpu",
        "resume/resume",
        "fork/fork",
        "verify/segment",
        "export/checkpoint",
        "prepare/tiny-cpu",
        "gates/newest-checkpoint",
        "compare/two-runs",
    }
    nightly = deployed["nightly/tiny-cpu"]
    assert nightly["entrypoint"] == "flows.nightly.nightly"
    assert nightly["global_concurrency_limit"]["limit"] == 1
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"


def test_a_watched_nightly_ends_identical_with_exit_code_0(server: Server) -> None:
    code, flow_run = server.watch_nightly("green")
    assert (flow_run["state"]["name"], flow_run["state"]["type"]) == ("Identical", "COMPLETED")
    assert code == 0
    artifacts = server.artifacts(flow_run)
    assert {"verdict", "stages"} <= set(artifacts)
    assert artifacts["verdict"]["data"].startswith("# Identical")
    stages = json.loads(artifacts["stages"]["data"])
    assert {(row["leg"], row["stage"]) for row in stages} >= {
        (leg, stage) for leg in "ab" for stage in ("download", "convert", "train", "export")
    }


def test_a_watched_nightly_that_diverged_does_not_exit_with_0(server: Server) -> None:
    code, flow_run = server.watch_nightly("red", inject_flip="step=1,probe=grads")
    assert (flow_run["state"]["name"], flow_run["state"]["type"]) == ("Diverged", "FAILED")
    assert "step 1 update 0 grads" in flow_run["state"]["message"]
    assert code != 0
    assert server.artifacts(flow_run)["verdict"]["data"].startswith("# Diverged")


def test_a_parameter_of_a_wrong_type_is_refused_before_a_run_exists(server: Server) -> None:
    before = server.ask("/flow_runs/count", {})
    refused = server.prefect("deployment", "run", "nightly/tiny-cpu", "--param", "overrides=5")
    assert refused.returncode != 0, refused
    assert "overrides" in refused.stdout + refused.stderr
    assert server.ask("/flow_runs/count", {}) == before
