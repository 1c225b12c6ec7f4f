"""The shipped deployments work for real: a server, a process worker, watched nightly runs."""

from __future__ import annotations

import json

import pytest

from tests.flows.command_line import wait_until
from tests.flows.conftest import Night
from tests.flows.prefect_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
        "verify-lock/all-stages",
        "export/checkpoint",
        "rollout-only/tiny-cpu",
        "train-only/dump",
        "prepare/tiny-cpu",
        "gates/newest-checkpoint",
        "compare/two-runs",
    }
    nightly = deployed["nightly/tiny-cpu"]
    assert nightly["entrypoint"] == "flows.nightly.nightly"
    assert nightly["global_concurrency_limit"]["limit"] == 1
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert [schedule["active"] for schedule in nightly["schedules"]] == [True]


def test_the_schedule_of_the_nightly_makes_runs(server: Server) -> None:
    def scheduled() -> list[object]:
        query = {"flow_runs": {"tags": {"all_": ["auto-scheduled", "nightly"]}}}
        return list(server.ask("/flow_runs/filter", query))

    wait_until(scheduled, seconds=90, what="the server has scheduled the next night")


def test_a_watched_nightly_ends_identical_with_exit_code_0(
    server: Server, first_night: Night
) -> None:
    flow_run = first_night.flow_run
    assert (flow_run["state"]["name"], flow_run["state"]["type"]) == ("Identical", "COMPLETED")
    assert first_night.code == 0
    assert flow_run["name"].startswith("nightly tiny_cpu plan.num_steps=2")
    artifacts = server.artifacts(flow_run)
    assert set(artifacts) == {"verdict", "stages", "mlflow", "progress-a", "nights"}
    assert artifacts["verdict"]["data"].startswith("# Identical")
    assert artifacts["progress-a"]["data"] == 100.0
    assert "mlflow ui --backend-store-uri" in artifacts["mlflow"]["data"]
    assert "| Identical |" in artifacts["nights"]["data"]
    stages = json.loads(artifacts["stages"]["data"])
    assert {(row["leg"], row["stage"]) for row in stages} >= {
        (leg, stage)
        for leg in ("a", "b", "resume")
        for stage in ("download", "convert", "train", "export")
    }


@pytest.mark.exhaustive
def test_a_watched_nightly_that_diverged_ends_red_and_logs_no_traceback(
    server: Server, second_night: Night
) -> None:
    flow_run = second_night.flow_run
    assert (flow_run["state"]["name"], flow_run["state"]["type"]) == ("Diverged", "FAILED")
    assert "step 1 update 0 grads" in flow_run["state"]["message"]
    assert second_night.code != 0
    assert flow_run["name"].endswith("flip step=1,probe=grads,element=0,bit=0")
    assert server.artifacts(flow_run)["verdict"]["data"].startswith("# Diverged")
    assert "Diverged" in server.logs(flow_run)  # the logs have arrived
    assert "unexpected" not in server.logs(flow_run)
    for log in (server.logs(flow_run), (server.folder / "worker.log").read_text()):
        assert "Traceback" not in log
