"""A new run that begins with a checkpoint of another and may change what decides bits.

python -m flows.fork RUN@STEP
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from engines.checkpoint.dcp import read_meta
from engines.checkpoint.retention import disk_need, require_disk
from flows.conclusion import conclude
from flows.legs import run_leg
from flows.run_request import ForkRequest, run_at_step, run_name
from model_specs.errors import SpecError
from model_specs.fingerprint import spec_differences, trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.run_spec import ForkOrigin, RunSpec


@flow(name="fork", flow_run_name=run_name)
def fork(request: ForkRequest, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Start a run from a checkpoint's weights and optimizer state; its ledger is its own.

    Args:
        request: Parent, leg and step, and overrides.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    run, step = run_at_step(request.run)
    return branch_off(
        run, step, request.assignments, leg=request.leg, runs_dir=runs_dir, run_id=run_id
    )


def branch_off(
    run: str,
    step: int | None,
    overrides: tuple[str, ...],
    *,
    leg: str,
    runs_dir: str,
    run_id: str | None,
) -> State:
    """Start a run from a checkpoint of another; see `fork`."""
    parent = runs.open_run(run, Path(runs_dir))
    spec = forked(parent, step, overrides, leg=leg)
    require_disk(disk_need(spec, start_step=spec.start_step), runs_dir)
    opened = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    return conclude(opened, (run_leg(spec, opened, "a"),))


def forked(parent: Path, step: int | None, overrides: tuple[str, ...], *, leg: str) -> RunSpec:
    """Return the spec of a fork: the parent's with its origin recorded and overrides applied.

    Raises:
        SpecError: The model would change, or the plan ends before the fork begins.
        CheckpointError: The parent has no committed checkpoint of that step.
    """
    spec = runs.read_spec(parent)
    _, found = runs.checkpoint_at(parent / leg, step)
    meta = read_meta(found.uri, trajectory=trajectory_fingerprint(spec))
    assigned = {text.partition("=")[0].strip() for text in overrides}
    changed = apply_overrides(_without_data_digests(spec, assigned), overrides)
    differences = spec_differences(spec, changed)
    is_other_filter = any(row[0].startswith("filter.") for row in differences)
    is_other_text = changed.data.digest != spec.data.digest
    if changed.filter is not None and (is_other_filter or is_other_text):
        # What the parent's filter kept of its data is no result of this one's.
        changed = apply_overrides(changed, ("filter.kept_ids=[]", "filter.kept_digest=null"))
    rows = [row for row in differences if row[0].startswith("model.")]
    if rows:
        shown = "; ".join(f"{field}: {old!r} -> {new!r}" for field, old, new in rows)
        raise SpecError(
            f"a fork begins with its parent's weights, so its model cannot change, but: {shown}"
        )
    origin = ForkOrigin(
        step=meta.step,
        state_digest=meta.state_digest,
        run=parent.name,
        leg=leg,
        chain_digest=meta.chain_digest,
        checkpoint=found.uri,
    )
    return RunSpec.model_validate({**changed.model_dump(), "origin": origin.model_dump()})


def _without_data_digests(spec: RunSpec, assigned: set[str]) -> RunSpec:
    """Clear the digest of what is read from another place once these fields are assigned.

    Download fills it in; where the text was not changed, it is the same again.
    """
    data, plan = spec.data, spec.plan
    if assigned & {"data.source", "data.split"}:
        data = data.model_copy(update={"digest": None})
    if assigned & {"data", "data.source"}:  # a set without a source is read from the run's
        evals = tuple(
            chosen if chosen.source is not None else chosen.model_copy(update={"digest": None})
            for chosen in plan.evals
        )
        plan = plan.model_copy(update={"evals": evals})
    return spec.model_copy(update={"data": data, "plan": plan})


if __name__ == "__main__":
    fork(ForkRequest(run=sys.argv[1]))
