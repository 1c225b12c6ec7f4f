"""Two complete, independent legs of one recipe, and whether they are the same bits.

python -m flows.twin
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from engines.checkpoint.retention import disk_need, require_disk
from engines.faults import parse_flip
from engines.seeds import derive_seed
from flows.conclusion import conclude
from flows.dry import check_flip
from flows.legs import run_leg
from flows.run_request import TwinRequest, run_name
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tasks import compare


@flow(name="twin", flow_run_name=run_name)
def twin(request: TwinRequest, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Run legs a and b from nothing, compare them, and end in a state named by the verdict.

    Args:
        request: Recipe, overrides, and a bit to be flipped in leg b.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    flip = parse_flip(request.inject_flip.as_text()) if request.inject_flip else None
    if flip is not None:
        check_flip(spec, flip.step)
    require_disk(disk_need(spec, start_step=0, num_legs=2), runs_dir)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    leg_a = run_leg(spec, run, "a")
    # Resolved by leg a: a branch on a hub that moves meanwhile must not reach leg b, and what the
    # filter kept must be found again.
    resolved = runs.read_spec(run.folder)
    leg_b = run_leg(shuffled(resolved, "b"), run, "b", flip=flip)
    if not (leg_a.chain_digest and leg_b.chain_digest):
        return conclude(run, (leg_a, leg_b))  # A leg that was cut short may have no ledger.
    return conclude(run, (leg_a, leg_b), compare.compare_legs(run.folder, "a", "b"))


def shuffled(spec: RunSpec, leg: str) -> RunSpec:
    """The same identity with another order of requests: it must not change a bit."""
    seed = derive_seed(spec.seeds.root, "request_order", leg)
    return spec.model_copy(
        update={"execution": spec.execution.model_copy(update={"request_order_seed": seed})}
    )


if __name__ == "__main__":
    twin(TwinRequest(recipe="tiny_cpu"))
