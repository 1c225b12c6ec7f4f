"""Any committed checkpoint as a Hugging Face folder.

python -m flows.export RUN@STEP
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prefect import flow

from engines import runs
from tasks.export import export_alone


@flow(name="export", flow_run_name="export-{run}")
def export(
    run: str,
    step: int | None = None,
    out: str | None = None,
    leg: str = "a",
    runs_dir: str = "runs",
) -> dict[str, Any]:
    """Write a folder that transformers and vLLM load, and prove that it is the trained weights.

    Args:
        run: Name or folder of the run.
        step: Checkpoint to export; the newest when omitted.
        out: New folder; `RUN/<leg>/exports/step-...` when omitted.
        leg: Leg of the run.
        runs_dir: Folder that holds run folders.

    Returns:
        `folder`, `step`, `state_digest` of the checkpoint, `digest` over the exported tensors.
    """
    folder = runs.open_run(run, Path(runs_dir))
    chosen, checkpoint = runs.checkpoint_at(folder / leg, step)
    target = Path(out) if out else folder / leg / "exports" / Path(checkpoint.uri).name
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
    name, _, number = sys.argv[1].partition("@")
    export(name, int(number) if number else None)
