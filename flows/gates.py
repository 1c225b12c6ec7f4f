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


@flow(name="gates", flow_run_name="gates-{run}")
def gates(run: str, leg: str = "a", runs_dir: str = "runs") -> State:
    """Preflight, one rollout scored on both sides, and both controls; trains nothing.

    Args:
        run: Name or folder of the run.
        leg: Leg whose newest checkpoint is used.
        runs_dir: Folder that holds run folders.
    """
    folder = runs.open_run(run, Path(runs_dir))
    source = folder / leg
    opened = runs.new_run(runs.read_spec(folder), folder / "gates")
    result = gate_leg(runs.read_spec(folder), opened, source)
    return conclude(opened, (result,))


if __name__ == "__main__":
    gates(sys.argv[1])
