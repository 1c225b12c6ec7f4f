"""The two halves of a run apart, to find a fault: rollout only, and training from dumped rollouts.

python -m flows.halves rollout tiny_cpu
python -m flows.halves train RUN/a
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import Completed, State

from engines import runs
from engines.checkpoint.retention import half_need, require_disk
from engines.contracts import ArtifactRef
from engines.provenance.ledger import LEDGER_FILE
from engines.rollout_dump import RolloutDump, read_dumps
from flows.conclusion import conclude
from flows.legs import replay_leg, rollout_leg
from flows.run_request import Request, TrainOnlyRequest, run_name
from flows.verify import own_inputs
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec
from tasks import compare

NOT_REPLAYED = ("received",)
"""Probes that a training without rollout engines does not have."""


@flow(name="rollout-only", flow_run_name=run_name)
def rollout_only(request: Request, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Draw and reward `plan.num_steps` steps at the initial weights, and dump them.

    Args:
        request: Recipe and overrides.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    require_disk(half_need(spec, trained_steps=0), runs_dir)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    dumps = rollout_leg(spec, run)
    message = f"{len(dumps)} steps were drawn and nothing was trained: {dumps[0].parent}"
    details = {
        "run_id": run.run_id,
        "folder": str(run.folder),
        "verdict": None,
        "exit_code": 0,
        "headline": message,
        "dumps": [str(path) for path in dumps],
    }
    return Completed(name="Drawn", message=message, data=details)


@flow(name="train-only", flow_run_name=run_name)
def train_only(
    request: TrainOnlyRequest, runs_dir: str = "runs", run_id: str | None = None
) -> State:
    """Train on dumped rollouts without a rollout engine.

    Where the dump lies in a run of the same trajectory, the training is compared with that run's
    ledger: green is `Identical`.

    Args:
        request: What was dumped, overrides, and a recipe where the spec is not the dump's own.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    dumps, spec = replayed(request)
    source = leg_of(dumps)
    start = start_of(dumps, source)
    require_disk(half_need(spec, trained_steps=len(dumps)), runs_dir)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    result = replay_leg(spec, run, dumps, start)
    resolved = runs.read_spec(run.folder)
    same = dumps[0].trajectory == trajectory_fingerprint(resolved)
    comparison = None
    if result.chain_digest and same and (source / LEDGER_FILE).is_file():
        comparison = compare.compare_folders(source, run.folder / "a", ignoring=NOT_REPLAYED)
    steps = f"steps {dumps[0].drawn.step} to {dumps[-1].drawn.step} from {source}"
    return conclude(run, (result,), comparison, more={"about": steps})


def replayed(request: TrainOnlyRequest) -> tuple[tuple[RolloutDump, ...], RunSpec]:
    """Return the dumps that are trained on and the spec, of the recipe or of the dumps' own leg.

    Raises:
        SpecError: No recipe is named, and the leg has no spec or one of another trajectory; or an
            override cannot be used.
        ArtifactError: There are no dumps that can be read.
    """
    dumps = read_dumps(request.dump)
    if request.names_recipe:
        return dumps, apply_overrides(load_recipe(request.source), request.assignments)
    leg = leg_of(dumps)
    if not (leg / "spec.json").is_file():
        raise SpecError(
            f"{dumps[0].path} is not in the folder of a leg, since {leg} has no spec.json; name "
            "the recipe that it was drawn with: lockstep run RECIPE --train-only DUMP"
        )
    spec = runs.read_spec(leg)
    if trajectory_fingerprint(spec) != dumps[0].trajectory:
        raise SpecError(
            f"{dumps[0].path} was drawn in trajectory {dumps[0].trajectory}, but {leg}/spec.json "
            f"is trajectory {trajectory_fingerprint(spec)}; name the recipe that it was drawn with"
        )
    # Nothing is evaluated, so no data of evaluations is needed.
    plan = spec.plan.model_copy(update={"evals": ()})
    own = own_inputs(spec, leg).model_copy(update={"plan": plan})
    return dumps, apply_overrides(own, request.assignments)


def leg_of(dumps: tuple[RolloutDump, ...]) -> Path:
    """Return the folder of the leg that drew the dumps, where they were not moved."""
    return dumps[0].path.resolve().parent.parent


def start_of(dumps: tuple[RolloutDump, ...], source: Path) -> ArtifactRef | None:
    """Return the checkpoint that the dumped steps begin with; None for the initial weights.

    Raises:
        SpecError: The leg that drew them has no checkpoint of the step before.
    """
    before = dumps[0].drawn.step - 1
    if before == 0:
        return None
    found = runs.checkpoints(source)
    if before not in found:
        raise SpecError(
            f"{dumps[0].path} was drawn at the weights of step {before}, and {source} has no "
            f"checkpoint of it (it has {sorted(found)}); name the dump of a step that follows one, "
            "or a folder that begins with step 1"
        )
    return found[before]


if __name__ == "__main__":
    if sys.argv[1] == "rollout":
        rollout_only(Request(recipe=sys.argv[2]))
    else:
        train_only(TrainOnlyRequest(dump=sys.argv[2]))
