"""The two halves of a run apart, to find a fault: rollout only, and training from dumped rollouts.

python -m flows.halves rollout tiny_cpu
python -m flows.halves train tiny_cpu RUN/a
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import Completed, State

from engines import runs
from engines.contracts import ArtifactRef
from engines.provenance.ledger import LEDGER_FILE
from engines.rollout_dump import RolloutDump, read_dumps
from flows.conclusion import conclude
from flows.legs import replay_leg, rollout_leg
from flows.run_request import Request, TrainOnlyRequest, run_name
from model_specs.errors import SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
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
        request: Recipe, overrides, and what was dumped.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    dumps = read_dumps(request.dump)
    source = dumps[0].path.resolve().parent.parent
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    start = start_of(dumps, source)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    result = replay_leg(spec, run, dumps, start)
    resolved = runs.read_spec(run.folder)
    same = dumps[0].trajectory == trajectory_fingerprint(resolved)
    comparison = None
    if result.chain_digest and same and (source / LEDGER_FILE).is_file():
        comparison = compare.compare_folders(source, run.folder / "a", ignoring=NOT_REPLAYED)
    steps = f"steps {dumps[0].drawn.step} to {dumps[-1].drawn.step} from {source}"
    return conclude(run, (result,), comparison, more={"about": steps})


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
        train_only(TrainOnlyRequest(recipe=sys.argv[2], dump=sys.argv[3]))
