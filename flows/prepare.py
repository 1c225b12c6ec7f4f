"""Download and convert alone: what a run needs before it can start.

python -m flows.prepare
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from engines import runs
from flows.run_request import Request, run_name
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from tasks import convert, download
from tasks.session import leg_session


@flow(name="prepare", flow_run_name=run_name)
def prepare(request: Request, runs_dir: str = "runs", run_id: str | None = None) -> str:
    """Materialise and convert a recipe's inputs; returns the run folder that holds them.

    Args:
        request: Recipe and overrides.
        runs_dir: Folder that holds run folders.
        run_id: Name of the new run folder; made from time, recipe and fingerprint when omitted.
    """
    spec = apply_overrides(load_recipe(request.source), request.assignments)
    run = runs.new_run(spec, Path(runs_dir), run_id=run_id)
    with leg_session(spec, run_dir=run.folder, leg="a", fence=run.fence) as session:
        inputs = download.download(session.name)
        convert.convert(session.name, inputs.model)
    return str(run.folder)


if __name__ == "__main__":
    prepare(Request(recipe="tiny_cpu"))
