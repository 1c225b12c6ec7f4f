"""Break live things on purpose and show what catches each: how far the evidence can be trusted.

python -m flows.drill
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import Completed, Failed, State

from engines import runs
from engines.drill.catalogue import DRILL, drill_spec
from flows.conclusion import RedVerdictError
from tasks import convert, download, train
from tasks.drill import drill as drill_stage
from tasks.session import leg_session


@flow(name="drill")
def drill(
    names: tuple[str, ...] = DRILL, runs_dir: str = "runs", run_id: str | None = None
) -> State:
    """Try faults on one session of a tiny recipe; green is that each was caught at its place.

    Args:
        names: Faults of `engines.drill.catalogue`.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    spec = drill_spec()
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    with leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as session:
        name = session.name
        inputs = download.download(name)
        weights = convert.convert(name, inputs.model)
        train.start_engines(name, inputs.model, inputs.data, weights)
        result = drill_stage(name, inputs.model, inputs.data, weights, names)
    details = {"run_id": run.run_id, "folder": str(run.folder), **summary(result)}
    if details["exit_code"] == 0:
        return Completed(name="Caught", message=details["headline"], data=details)
    error = RedVerdictError(details["headline"], details=details)
    return Failed(name="Missed", message=details["headline"], data=error)


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Add headline and exit code to what the drill found: 0 only when nothing is wrong."""
    caught = sum(row["caught"] for row in result["faults"])
    number, alarms = len(result["faults"]), len(result["false_alarms"])
    return {
        **result,
        "headline": (
            f"{caught} of {number} faults were caught at their place; "
            f"{alarms} false alarms without a fault"
        ),
        "exit_code": 0 if caught == number > 0 and not alarms else 1,
    }


if __name__ == "__main__":
    drill()
