"""Compare two legs or runs that exist already.

python -m flows.compare RUN_A RUN_B
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect import flow
from prefect.states import State

from engines import runs
from flows.conclusion import final_state
from tasks import compare as comparison_tasks


@flow(name="compare", flow_run_name="compare-{run_a}-{run_b}")
def compare(run_a: str, run_b: str, across: tuple[str, ...] = (), runs_dir: str = "runs") -> State:
    """Compare two runs, or two legs as RUN/LEG, and end in a state named by the verdict.

    Args:
        run_a: Run name, run folder, or RUN/LEG.
        run_b: The same for the other side.
        across: Spec fields that are expected to differ.
        runs_dir: Folder that holds run folders.
    """
    sides = [runs.open_leg(name, Path(runs_dir)) for name in (run_a, run_b)]
    found = comparison_tasks.compare_folders(*sides, across=across)
    return final_state(found.verdict, headline=found.headline, details=found.to_dict())


if __name__ == "__main__":
    compare(sys.argv[1], sys.argv[2])
