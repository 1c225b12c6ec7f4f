"""What a run would be, without starting anything: resolved spec, fingerprints, stage plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engines.checkpoint.retention import disk_need
from engines.data import data_file
from engines.faults import parse_flip
from engines.provenance.verdict import Verdict
from engines.train.registry import check_supported
from model_specs.errors import SpecError
from model_specs.fingerprint import flattened, plan_fingerprint, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from model_specs.sources import GENERATED_PREFIX, is_url


def check(recipe: str, overrides: tuple[str, ...], inject_flip: str | None) -> RunSpec:
    """Refuse a bad recipe, override or flip, and what no trainer does, before anything starts."""
    spec = apply_overrides(load_recipe(recipe), overrides)
    check_supported(spec)
    _check_data(spec)
    if inject_flip is not None:
        check_flip(spec, parse_flip(inject_flip).step)
    return spec


def check_flip(spec: RunSpec, step: int) -> None:
    """Refuse a flip in a step that the run does not have: it would be found by nobody."""
    if not 1 <= step <= spec.plan.num_steps:
        raise SpecError(f"--inject-flip step={step}: the run has steps 1 to {spec.plan.num_steps}")


def _check_data(spec: RunSpec) -> None:
    """Refuse a local data source that is not there."""
    for data in (spec.data, *(chosen.data_of(spec.data) for chosen in spec.plan.evals)):
        if not (data.source.startswith(GENERATED_PREFIX) or is_url(data.source)):
            data_file(Path(data.source).expanduser(), split=data.split)


def stage_plan(spec: RunSpec, *, twin: bool) -> list[str]:
    """The stages of a run in their order."""
    from engines.plan import segment_stops

    rows = []
    for leg in ("a", "b") if twin else ("a",):
        rows += [f"{leg} download", f"{leg} convert", f"{leg} engines", f"{leg} preflight"]
        rows += [f"{leg} filter"] if spec.filter is not None else []
        start = 0
        for stop in segment_stops(spec.plan, 0):
            rows += [f"{leg} train {start + 1}-{stop}", f"{leg} checkpoint {stop}"]
            start = stop
        rows += [f"{leg} {stage}" for stage in ("export", "layerwise", "controls", "gates")]
    return [*rows, "compare a b"] if twin else rows


def show_plan(recipe: str, overrides: tuple[str, ...], *, twin: bool, as_json: bool) -> int:
    """Print the resolved spec, its fingerprints and the stage plan."""
    spec = check(recipe, overrides, None)
    plan: dict[str, Any] = {
        "spec": json.loads(spec.model_dump_json()),
        "trajectory_fingerprint": trajectory_fingerprint(spec),
        "plan_fingerprint": plan_fingerprint(spec),
        "disk_need": str(disk_need(spec, start_step=0, num_legs=2 if twin else 1)),
        "stages": stage_plan(spec, twin=twin),
    }
    console = Console()
    if as_json:
        console.print_json(json.dumps(plan))
        return 0
    table = Table("identity", "value", box=None, pad_edge=False)
    for name, value in flattened(spec).items():
        table.add_row(name, repr(value))
    console.print(table)
    console.print(f"trajectory {plan['trajectory_fingerprint']}")
    console.print(f"plan       {plan['plan_fingerprint']}")
    console.print(f"disk need  {plan['disk_need']}")
    console.print(
        "Digests shown as None are filled in by download and then belong to the trajectory."
    )
    for row in plan["stages"]:
        console.print(f"  {row}")
    return Verdict.ALIGNED.exit_code
