"""A night of one recipe: is it the same bits as itself, as its resumed half, and as last night?

python -m flows.nightly
"""

from __future__ import annotations

import secrets
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from engines.checkpoint.retention import disk_need, require_disk
from engines.plan import with_middle_checkpoint
from flows.conclusion import conclude
from flows.dry import check_flip
from flows.leg import LegRequest, run_elsewhere
from flows.legs import run_leg
from flows.run_request import NightlyRequest, run_name
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from model_specs.variation import Variation, draw_variation
from tasks.compare import LegResult
from tasks.night_page import publish_nights
from tasks.nights import about, compare_night, decisive, night_details, shown_legs


@flow(name="nightly", flow_run_name=run_name)
def nightly(request: NightlyRequest, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Run leg a, leg b varied, and half of a resumed; compare them and the last green night.

    Args:
        request: Recipe, overrides, what leg b is run under, and a bit to be flipped in it.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    spec, middle = night_spec(request)
    require_disk(disk_need(spec, start_step=0, num_legs=3), runs_dir)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    variation = draw_variation(secrets.randbits(31), execution=spec.execution, what=request.vary)
    legs = [run_leg(spec, run, "a")]
    if legs[0].verdict.is_green or legs[0].on_report:
        legs += more_legs(run, request, variation=variation, middle=middle)
    rows = compare_night(run.folder, legs, variation=variation)
    found = decisive(rows)
    state = conclude(
        run,
        legs,
        found.comparison if found else None,
        more={
            "about": about(rows),
            "night": night_details(run.folder, rows, variation=variation, resumed_at=middle),
        },
        found=shown_legs(run.folder, rows),
    )
    publish_nights(run.folder.parent)
    return state


def night_spec(request: NightlyRequest) -> tuple[RunSpec, int]:
    """Return the spec with a checkpoint in the middle that is still there at the end, and where."""
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    if request.inject_flip is not None:
        check_flip(spec, request.inject_flip.step)
    plan, middle = with_middle_checkpoint(spec.plan)
    return spec.model_copy(update={"plan": plan}), middle


def more_legs(
    run: runs.Run, request: NightlyRequest, *, variation: Variation, middle: int
) -> tuple[LegResult, LegResult]:
    """Run leg b and the resumed leg, each in a driver process of its own."""
    place = {"folder": str(run.folder), "attempt": run.fence.token}
    return (
        run_elsewhere(LegRequest(**place, leg="b", variation=variation, flip=request.inject_flip)),
        run_elsewhere(LegRequest(**place, leg="resume", resume_step=middle)),
    )


if __name__ == "__main__":
    nightly(NightlyRequest(recipe="tiny_cpu"))
