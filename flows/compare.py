"""Compare legs that exist already, by name, by MLflow id, or by a query of tags.

python -m flows.compare RUN_A RUN_B
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from flows.conclusion import final_state
from flows.run_request import CompareRequest, run_name
from tasks import comparison, tracking
from tasks.report import publish
from tasks.sides import open_sides


@flow(name="compare", flow_run_name=run_name)
def compare(request: CompareRequest, runs_dir: str = "runs", run_id: str | None = None) -> State:
    """Compare two or more legs with the first of them; the state is named by the verdict.

    The outcome is a run of its own, in the folder of runs and in MLflow: verdict, pages, plots, and
    `repro/identical` and `repro/max_ulp` step by step. Nothing of what is compared is changed.

    Args:
        request: Legs by name, or the tags that they carry, and what is expected to differ.
        runs_dir: Folder that holds run folders.
        run_id: Name of the comparison's folder; made from the time when omitted.
    """
    place = Path(runs_dir)
    names = request.runs or comparison.legs_with_tags(
        request.tags, experiment=request.experiment, runs_dir=place
    )
    with open_sides(names, place) as sides:
        pairs = comparison.compare_with_first(sides, across=request.across)
        first = sides[0].path
        spec = runs.read_spec(first if (first / "spec.json").is_file() else first.parent)
        run = runs.new_run(spec, place, run_id=run_id or default_name())
        comparison.write_outcome(run, sides, pairs)  # what MLflow is given begins with it
        tracked = tracking.sync_quietly(run.folder)
        command = tracked.ui_command if tracked else None
        outcome = comparison.write_outcome(run, sides, pairs, mlflow_command=command)
        publish(
            run.folder,
            outcome,
            found=comparison.shown_legs(pairs),
            mlflow_page=tracked.page if tracked else None,
        )
        tracking.sync_quietly(run.folder)
    return final_state(outcome.verdict, headline=outcome.headline, details=outcome.details)


def default_name() -> str:
    """Return a name that sorts by time and says what it is.

    Without a fingerprint, by which runs of the recipe are found.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-comparison"


if __name__ == "__main__":
    compare(CompareRequest(runs=tuple(sys.argv[1:])))
