"""A deployment's request is typed and refused by field before a run exists; red nights post.

A real server; no engine is started: verdicts are set through the API as the flows end in them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.flows.command_line import ROOT, wait_until
from tests.flows.deployment_requests import GOOD, REFUSED, TINY
from tests.flows.prefect_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rows(cases: Sequence[tuple[object, ...]]) -> list[Any]:
    """Each case costs a start of `prefect`; without a server all are asked of the schema."""
    return [
        pytest.param(*case, marks=pytest.mark.exhaustive if number else ())
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("deployment", "request_", "field"), rows(REFUSED))
def test_a_bad_value_is_refused_by_its_field_before_a_run_exists(
    server: Server, deployment: str, request_: dict[str, Any], field: str
) -> None:
    before = server.num_runs()
    refused = server.ask_for(deployment, request_)
    assert refused.returncode != 0
    assert field in "".join(refused.stdout.split("\n"))
    assert server.num_runs() == before


def test_a_good_request_makes_a_run_that_waits_for_a_worker(server: Server) -> None:
    before = server.num_runs()
    asked = {**TINY, "overrides": {"plan.num_steps": 1, "reduction.kind": "tree"}}
    accepted = server.ask_for("train/tiny-cpu", asked, "--start-in", "in 10 hours")
    assert accepted.returncode == 0, accepted
    assert server.num_runs() == before + 1


@pytest.mark.parametrize(("deployment", "request_"), rows(GOOD))
def test_each_flow_over_a_run_takes_its_request(
    server: Server, deployment: str, request_: dict[str, Any]
) -> None:
    before = server.num_runs()
    accepted = server.ask_for(deployment, request_, "--start-in", "in 10 hours")
    assert accepted.returncode == 0, accepted
    assert server.num_runs() == before + 1


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web server and the JSON bodies that were posted to it."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.server_port}/hook", bodies
        listener.shutdown()
        thread.join(timeout=10)


def end_night(server: Server, deployment: str, verdict: str) -> str:
    """Let a night of a deployment end with this verdict; returns the flow run's id."""
    asked = server.ask_for(deployment, TINY, "--start-in", "in 10 hours")
    found = re.search(r"UUID: (\S+)", asked.stdout)
    assert found is not None, asked
    state_type = "COMPLETED" if verdict == "Identical" else "FAILED"
    state = {"type": state_type, "name": verdict, "message": f'leg b said "{verdict}"'}
    server.ask(f"/flow_runs/{found[1]}/set_state", {"state": state, "force": True})
    return found[1]


def test_the_first_red_night_posts_once_and_again_only_after_a_green_one(
    server: Server, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = hook
    ended = subprocess.run(
        [sys.executable, "tools/watch_nightly.py", url],
        env={**os.environ, **server.environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended
    assert "nightly/tiny-cpu" in ended.stdout
    posts: list[tuple[str, str]] = []
    nights = (
        *(("tiny-cpu", "Diverged"), ("tiny-cpu", "Diverged"), ("tiny-cpu", "Identical")),
        *(("gsm8k-smollm2-135m", "EngineFailure"), ("tiny-cpu", "Misaligned")),
    )
    # The third night is red again, and green nights never post.
    expected = [nights[0], nights[3], nights[4]]
    for deployment, verdict in nights:
        end_night(server, f"nightly/{deployment}", verdict)
        if (deployment, verdict) in expected and (deployment, verdict) not in posts:
            posts.append((deployment, verdict))
            wait_until(lambda: len(bodies) >= len(posts), seconds=60, what="the webhook is called")
    found = [(body["deployment"], body["verdict"]) for body in bodies]
    assert found == expected
    assert bodies[0]["message"] == 'leg b said "Diverged"'
