"""A deployment's request is typed: what its schema refuses, and what the command line makes of it.

The schema is checked as Prefect's server does it, without one; `test_typed_deployments.py` asks a
real server.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from flows.gates import gates
from flows.run_request import (
    ForkRequest,
    GatesRequest,
    NightlyRequest,
    TrainRequest,
    VerifyLockRequest,
    VerifyRequest,
    as_overrides,
    asked,
    flip_request,
    request_source,
)
from flows.verify_lock import verify_lock
from model_specs.errors import SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from tests.flows.deployment_requests import GOOD, REFUSED, entrypoints, refusals
from tests.flows.documented import PAGES, commands


@pytest.mark.parametrize(("deployment", "request_", "field"), REFUSED)
def test_the_schema_refuses_a_bad_value_by_its_field(
    deployment: str, request_: dict[str, Any], field: str
) -> None:
    found = refusals(deployment, {"request": request_})
    assert found
    assert field in "; ".join(found)


@pytest.mark.parametrize(("deployment", "request_"), GOOD)
def test_the_schema_takes_a_good_request(deployment: str, request_: dict[str, Any]) -> None:
    assert refusals(deployment, {"request": request_}) == []


def test_every_deployment_run_of_the_pages_is_taken() -> None:
    tried = set()
    for command in sorted({found for page in PAGES for found in commands(page)}):
        words = shlex.split(command)
        if words[:3] != ["prefect", "deployment", "run"]:
            continue
        given = [words[n + 1] for n, word in enumerate(words) if word == "--param"]
        parameters = {text.partition("=")[0]: json.loads(text.partition("=")[2]) for text in given}
        assert words[3] in entrypoints(), command
        if parameters:  # else the deployment's own are taken
            assert refusals(words[3], parameters) == [], command
        tried.add(words[3])
    assert len(tried) > 6


def test_the_command_line_refuses_what_the_server_would_by_the_same_names() -> None:
    asked_for = asked(ForkRequest, run="run@4", overrides=as_overrides(("optimizer.lr=1e-3",)))
    assert asked_for.describe() == "run@4 optimizer.lr=1e-3"
    assert asked_for.assignments == ("optimizer.lr=1e-3",)
    with pytest.raises(SpecError, match=r"segment=0: .*greater than or equal to 1"):
        asked(VerifyRequest, run="run", segment=0)
    with pytest.raises(SpecError, match=r"leg='a/b'"):
        asked(ForkRequest, run="run", leg="a/b")
    with pytest.raises(SpecError, match=r"lock='run@2'"):
        asked(VerifyLockRequest, lock="run@2")


def test_every_deployment_takes_one_typed_request() -> None:
    for deployment in entrypoints():
        found = "; ".join(refusals(deployment, {}))
        assert "'request' is a required property" in found, deployment
        unknown = "; ".join(refusals(deployment, {"request": {"nobody": 1}}))
        assert "request" in unknown, deployment


def test_the_flows_over_a_run_look_for_the_run_of_their_request(tmp_path: Path) -> None:
    place = {"runs_dir": str(tmp_path)}
    with pytest.raises(SpecError, match="run 'locked': 0 runs match"):
        verify_lock.fn(VerifyLockRequest(lock="locked"), **place)
    with pytest.raises(SpecError, match="run 'gone': 0 runs match"):
        gates.fn(GatesRequest(run="gone"), **place)


def test_overrides_reach_the_spec_as_set_does() -> None:
    request = TrainRequest(
        recipe="tiny_cpu",
        overrides={"plan.num_steps": 3, "data.shuffle": False, "data.template": "{question}!"},
    )
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    assert (spec.plan.num_steps, spec.data.shuffle) == (3, False)
    assert spec.data.template == "{question}!"


def test_the_command_line_makes_the_same_requests() -> None:
    assert request_source("my.py:recipe") == {"recipe_path": "my.py:recipe"}
    assert as_overrides(("plan.num_steps=2", "plan.num_steps=3")) == {"plan.num_steps": "3"}
    with pytest.raises(SpecError, match="not of the form key=value"):
        as_overrides(("plan.num_steps",))
    flip = flip_request("step=3,probe=grads,bit=2")
    asked = NightlyRequest(recipe="tiny_cpu", inject_flip=flip)
    assert asked.describe() == "tiny_cpu flip step=3,probe=grads,element=0,bit=2"
