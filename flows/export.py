"""Any committed checkpoint as a Hugging Face folder.

python -m flows.export RUN@STEP
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prefect import flow

from engines import runs
from flows.run_request import ExportRequest, run_at_step, run_name
from tasks.export import export_alone


@flow(name="export", flow_run_name=run_name)
def export(request: ExportRequest, runs_dir: str = "runs") -> dict[str, Any]:
    """Write a folder that transformers and vLLM load, and prove that it is the trained weights.

    Args:
        request: Run, leg and step, and where to.
        runs_dir: Folder that holds run folders.

    Returns:
        `folder`, `step`, `state_digest` of the checkpoint, `digest` over the exported tensors.
    """
    run, step = run_at_step(request.run)
    leg = request.leg
    folder = runs.open_run(run, Path(runs_dir))
    chosen, checkpoint = runs.checkpoint_at(folder / leg, step)
    target = (
        Path(request.out) if request.out else folder / leg / "exports" / Path(checkpoint.uri).name
    )
    exported = export_alone(
        runs.read_spec(folder), checkpoint, model=folder / leg / "model", target=target.resolve()
    )
    return {
        "run_id": folder.name,
        "leg": leg,
        "step": chosen,
        "folder": exported.uri,
        "state_digest": checkpoint.digest,
        "digest": exported.digest,
    }


if __name__ == "__main__":
    export(ExportRequest(run=sys.argv[1]))
