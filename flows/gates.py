"""The gates alone, on the newest checkpoint of an existing run.

python -m flows.gates RUN
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from flows.conclusion import conclude
from flows.legs import gate_leg
from flows.run_request import GatesRequest, run_name


@flow(name="gates", flow_run_name=run_name)
def gates(request: GatesRequest, runs_dir: str = "runs") -> State:
    """Preflight, one rollout scored on both sides, and both controls; trains nothing.

    Args:
        request: Run, and the leg whose newest checkpoint is used.
        runs_dir: Folder that holds run folders.
    """
    folder = runs.open_run(request.run, Path(runs_dir))
    source = folder / request.leg
    opened = runs.new_run(runs.read_spec(folder), folder / "gates")
    result = gate_leg(runs.read_spec(folder), opened, source)
    return conclude(opened, (result,))


if __name__ == "__main__":
    gates(GatesRequest(run=sys.argv[1]))
