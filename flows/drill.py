"""Break live things on purpose and show what catches each: how far the evidence can be trusted.

python -m flows.drill
"""

from __future__ import annotations

from pathlib import Path

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
    caught = sum(row["caught"] for row in result["faults"])
    green = caught == len(names) and not result["false_alarms"]
    headline = (
        f"{caught} of {len(names)} faults were caught at their place; "
        f"{len(result['false_alarms'])} false alarms without a fault"
    )
    details = {
        "run_id": run.run_id,
        "folder": str(run.folder),
        "headline": headline,
        "exit_code": 0 if green else 1,
        **result,
    }
    if green:
        return Completed(name="Caught", message=headline, data=details)
    return Failed(name="Missed", message=headline, data=RedVerdictError(headline, details=details))


if __name__ == "__main__":
    drill()
