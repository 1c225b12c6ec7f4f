"""`lockstep baseline`: what nights are compared with, instead of the last green one."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from flows.cli_options import Json, RunsDir

baseline = App(name="baseline", help="What nights are compared with: set, unset, show.")


@baseline.command(name="set")
def set_baseline(
    run: str, *, reason: str | None = None, runs_dir: RunsDir = Path("runs"), json: Json = False
) -> int:
    """Compare the nights of this run's trajectory and device class with it, not with last night.

    Parameters
    ----------
    run
        Run name or folder.
    reason
        Why it is right; needed where the run is red, recorded where it is not.
    """
    from flows import console

    return console.change_baseline(run, runs_dir=runs_dir, reason=reason, as_json=json)


@baseline.command(name="unset")
def unset_baseline(run: str, *, runs_dir: RunsDir = Path("runs"), json: Json = False) -> int:
    """Compare with the last green night again.

    Parameters
    ----------
    run
        The run that was set.
    """
    from flows import console

    return console.change_baseline(run, runs_dir=runs_dir, unset=True, as_json=json)


@baseline.command(name="show")
def show_baseline(
    run: str | None = None, *, runs_dir: RunsDir = Path("runs"), json: Json = False
) -> int:
    """Show the explicit baselines, or what the next night of a run's trajectory is compared with.

    Parameters
    ----------
    run
        Any run of the trajectory, by name or folder.
    """
    from flows import console

    return console.show_baselines(run, runs_dir=runs_dir, as_json=json)
