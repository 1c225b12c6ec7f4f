"""What deployments are asked for in tests, and the check that the server makes of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from tests.flows.command_line import ROOT

TINY = {"recipe": "tiny_cpu"}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nightly/tiny-cpu", {"recipe": "tiny"}, "request.recipe"),
    ("nightly/tiny-cpu", {}, "request"),
    ("nightly/tiny-cpu", {**TINY, "recipe_path": "a.py:b"}, "recipe_path"),
    ("nightly/tiny-cpu", {"recipe_path": "a.py"}, "request.recipe_path"),
    ("nightly/tiny-cpu", {**TINY, "overrides": {"plan.num_steps": 0}}, "plan.num_steps"),
    ("nightly/tiny-cpu", {**TINY, "overrides": {"optimizer.lr": "fast"}}, "optimizer.lr"),
    ("nightly/tiny-cpu", {**TINY, "overrides": {"optimizer.rate": 1.0}}, "optimizer.rate"),
    ("nightly/tiny-cpu", {**TINY, "inject_flip": {"step": 1, "probe": "prompts"}}, "probe"),
    ("nightly/tiny-cpu", {**TINY, "resume": "run@4"}, "resume"),
    ("nightly/tiny-cpu", {**TINY, "vary": ["weather"]}, "request.vary"),
    ("train/tiny-cpu", {"resume": "run@four"}, "request.resume"),
    ("train/tiny-cpu", {"fork": "run@"}, "request.fork"),
    ("train/tiny-cpu", {"resume": "run@4", "fork": "run@4"}, "fork"),
    ("prepare/tiny-cpu", {**TINY, "inject_flip": {"step": 1}}, "inject_flip"),
    ("resume/resume", {"run": "run@"}, "request.run"),
    ("resume/resume", {"run": "run", "overrides": {"plan.steps": 3}}, "plan.steps"),
    ("fork/fork", {"run": "run@4", "overrides": {"optimizer.lr": -1}}, "optimizer.lr"),
    ("fork/fork", {"run": "run", "leg": "a/b"}, "request.leg"),
    ("fork/fork", {"overrides": {}}, "'run'"),
    ("verify/segment", {"run": "run", "segment": 0}, "request.segment"),
    ("verify/segment", {"run": "run@2", "segment": 1}, "request.run"),
    ("verify/segment", {"run": "run"}, "'segment'"),
    ("verify-lock/all-stages", {"lock": "run@2"}, "request.lock"),
    ("verify-lock/all-stages", {"lock": ""}, "request.lock"),
    ("verify-lock/all-stages", {"lock": "run", "leg": "../a"}, "request.leg"),
    ("verify-lock/all-stages", {"leg": "a"}, "'lock'"),
    ("verify-lock/all-stages", {"lock": "run", "segment": 1}, "'segment'"),
    ("gates/newest-checkpoint", {"run": "run@2"}, "request.run"),
    ("gates/newest-checkpoint", {"run": ""}, "request.run"),
    ("gates/newest-checkpoint", {"run": "run", "leg": ""}, "request.leg"),
    ("gates/newest-checkpoint", {"run": "run", "leg": "a/b"}, "request.leg"),
    ("gates/newest-checkpoint", {}, "'run'"),
    ("export/checkpoint", {"run": "run@two"}, "request.run"),
    ("export/checkpoint", {"run": "run", "to": "x"}, "'to'"),
    ("rollout-only/tiny-cpu", {"recipe": "tiny"}, "request.recipe"),
    ("rollout-only/tiny-cpu", {**TINY, "dump": "x"}, "dump"),
    ("train-only/dump", TINY, "'dump'"),
    ("train-only/dump", {**TINY, "recipe_path": "a.py:b", "dump": "x"}, "recipe_path"),
    ("train-only/dump", {"recipe": "tiny", "dump": "x"}, "request.recipe"),
    ("compare/two-runs", {"runs": ["one"]}, "request.runs"),
    ("compare/two-runs", {"runs": ["one", "two"], "tags": {"recipe": "r"}}, "request"),
    ("compare/two-runs", {"tags": {}}, "request.tags"),
]
"""Deployment, request, and what the refusal names."""

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("resume/resume", {"run": "run@4", "overrides": {"plan.num_steps": 16}}),
    ("fork/fork", {"run": "some/run@4", "leg": "b", "overrides": {"filter": None}}),
    ("verify/segment", {"run": "run", "segment": 2}),
    ("verify-lock/all-stages", {"lock": "run", "leg": "b"}),
    ("verify-lock/all-stages", {"lock": "at@home/run/a/lock.json"}),
    ("gates/newest-checkpoint", {"run": "some/run"}),
    ("export/checkpoint", {"run": "run", "out": "folder"}),
    ("rollout-only/tiny-cpu", TINY),
    ("train-only/dump", {**TINY, "dump": "runs/drawn/a"}),
    ("train-only/dump", {"dump": "runs/drawn/a", "overrides": {"plan.num_steps": 4}}),
    ("compare/two-runs", {"tags": {"recipe": "tiny_cpu"}}),
]
"""Deployment, and a request that it takes."""


def entrypoints() -> dict[str, str]:
    """`flow/deployment` -> dotted name of the flow's function, for all of `prefect.yaml`."""
    declared = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    return {
        f"{function(found['entrypoint']).name}/{found['name']}": found["entrypoint"]
        for found in declared
    }


def function(entrypoint: str) -> Any:
    """The flow that an entry point names."""
    module, _, name = entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), name)


def refusals(deployment: str, parameters: Mapping[str, Any]) -> list[str]:
    """What Prefect's server would say of these parameters, from the schema that it is given."""
    schema = parameter_schema(function(entrypoints()[deployment])).model_dump_for_openapi()
    found = validate(dict(parameters), schema, raise_on_error=False, preprocess=False)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]
