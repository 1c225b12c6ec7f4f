"""`lockstep sync`: send to MLflow what it missed while its server was down."""

from __future__ import annotations

from pathlib import Path

from flows.cli_options import Json, RunsDir


def sync(run: str | None = None, *, runs_dir: RunsDir = Path("runs"), json: Json = False) -> int:
    """Send a run to MLflow again; without RUN, every run with a verdict that it does not have.

    Parameters
    ----------
    run
        Run name or folder.
    """
    from flows import console

    return console.show_sync(run, runs_dir=runs_dir, as_json=json)
