"""The command line: run, nightly, baseline, resume, fork, export, verify, diff, sync and more.

Every command ends with the exit code of its verdict. Nothing heavy is imported before a command
needs it: `diff`, `show` and `doctor` load neither Prefect nor torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from flows.baseline_commands import baseline
from flows.cli_options import Device, Json, RunsDir, Set
from flows.sync_command import sync
from model_specs.errors import CancelledError, LockstepError, SpecError

DISTRIBUTION = "lockstep-rl"

app = App(
    name="lockstep",
    help="RL post-training that runs again bit for bit, with the proof attached.",
    version_flags=["--version"],
    version=lambda: metadata.version(DISTRIBUTION),
    # `main` says that the run was cancelled, and how to go on.
    suppress_keyboard_interrupt=False,
)

app.command(baseline)
app.command(sync)


@app.command
def run(
    recipe: str | None = None,
    *,
    twin: Annotated[bool, Parameter(negative=())] = False,
    inject_flip: str | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    rollout_only: Annotated[bool, Parameter(negative=())] = False,
    train_only: Path | None = None,
    set_: Set = (),
    runs_dir: RunsDir = Path("runs"),
    run_id: str | None = None,
    device: Device = None,
    json: Json = False,
) -> int:
    """Run a recipe: one leg that ends Aligned, or with --twin two that must end Identical.

    Parameters
    ----------
    recipe
        Name of a shipped recipe, or an own one as FILE.py:function or my_pkg.mod:function. Only
        --train-only does without: it takes the spec of the leg that has the dump.
    twin
        Run two complete, independent legs and compare them.
    inject_flip
        With --twin: flip one bit of a live value in leg b, for example `step=3,probe=grads`.
    dry_run
        Print the resolved spec, its fingerprints and the stage plan; start nothing.
    rollout_only
        Draw and reward all steps at the initial weights and dump them; train nothing.
    train_only
        Train on dumped rollouts without a rollout engine: a file, a folder of them, or RUN/LEG.
    run_id
        Name of the new run folder.
    """
    from flows import dry

    if inject_flip is not None and not twin:
        raise SpecError("--inject-flip needs --twin: a flip is found by comparing two legs")
    if sum((twin or dry_run, rollout_only, train_only is not None)) > 1:
        raise SpecError("--rollout-only and --train-only are runs of their own: give one alone")
    if device is not None:
        set_ = (*set_, f"execution.device={device}")
    if recipe is not None:
        if dry_run:
            return dry.show_plan(recipe, set_, twin=twin, as_json=json)
        dry.check(recipe, set_, inject_flip)
    elif train_only is None:
        raise SpecError("no RECIPE is given; only --train-only takes its spec from elsewhere")
    prepare_process(json)
    from flows import run_request

    asked = {**run_request.request_source(recipe), "overrides": run_request.as_overrides(set_)}
    place: dict[str, Any] = {"runs_dir": str(runs_dir), "run_id": run_id, "return_state": True}
    if twin:
        from flows.twin import twin as twin_flow

        flip = run_request.flip_request(inject_flip)
        wanted = run_request.TwinRequest(**asked, inject_flip=flip)
        return finish(lambda: twin_flow(wanted, **place), json)
    if rollout_only or train_only is not None:
        if train_only is not None and not train_only.exists() and (runs_dir / train_only).exists():
            train_only = runs_dir / train_only
        return run_half(asked, place, dump=train_only, as_json=json)
    from flows.train import train

    return finish(lambda: train(run_request.TrainRequest(**asked), **place), json)


def run_half(
    asked: dict[str, Any], place: dict[str, Any], *, dump: Path | None, as_json: bool
) -> int:
    """Run one half of the steps alone: their rollouts, or with a dump their training."""
    from flows import halves, run_request

    if dump is None:
        wanted = run_request.Request(**asked)
        return finish(lambda: halves.rollout_only(wanted, **place), as_json)
    replay = run_request.TrainOnlyRequest(**asked, dump=str(dump))
    halves.replayed(replay)  # a mistake is refused at once, before a server is started
    return finish(lambda: halves.train_only(replay, **place), as_json)


@app.command
def nightly(
    recipe: str,
    *,
    vary: tuple[str, ...] | None = None,
    inject_flip: str | None = None,
    set_: Set = (),
    runs_dir: RunsDir = Path("runs"),
    run_id: str | None = None,
    json: Json = False,
) -> int:
    """Run a night: leg a, leg b varied, half of a resumed, and the comparison with last night.

    Parameters
    ----------
    recipe
        Name of a shipped recipe.
    vary
        What leg b is run under, such as `engines`; all when omitted. Repeatable.
    inject_flip
        Flip one bit of a live value in leg b, for example `step=3,probe=grads`.
    run_id
        Name of the new run folder.
    """
    from engines.plan import with_middle_checkpoint
    from flows import dry
    from model_specs.variation import VARIED, draw_variation

    spec = dry.check(recipe, set_, inject_flip)
    wanted = VARIED if vary is None else vary
    draw_variation(0, execution=spec.execution, what=wanted)  # refuses an unknown name
    with_middle_checkpoint(spec.plan)  # refuses a night of one step
    prepare_process(json)
    from flows import run_request
    from flows.nightly import nightly as nightly_flow

    request = run_request.NightlyRequest(
        **run_request.request_source(recipe),
        overrides=run_request.as_overrides(set_),
        inject_flip=run_request.flip_request(inject_flip),
        vary=wanted,
    )
    place: dict[str, Any] = {"runs_dir": str(runs_dir), "run_id": run_id, "return_state": True}
    return finish(lambda: nightly_flow(request, **place), json)


@app.command
def resume(
    run: str,
    *,
    set_: Set = (),
    leg: str = "a",
    runs_dir: RunsDir = Path("runs"),
    json: Json = False,
) -> int:
    """Go on from a committed checkpoint: RUN for the newest, RUN@STEP for an earlier one.

    Parameters
    ----------
    run
        Run name or folder, optionally with @STEP.
    leg
        Leg to go on with.
    """
    from flows import run_request

    name, step = run_request.run_at_step(run)
    prepare_process(json)
    from flows.train import resume as resume_flow
    from flows.train import resumption

    # A mistake is refused at once, before a server is started.
    resumption(name, step, set_, leg=leg, runs_dir=str(runs_dir))
    changes = run_request.as_overrides(set_)
    wanted = run_request.asked(run_request.ResumeRequest, run=run, overrides=changes, leg=leg)
    return finish(lambda: resume_flow(wanted, runs_dir=str(runs_dir), return_state=True), json)


@app.command
def fork(
    run: str,
    *,
    set_: Set = (),
    leg: str = "a",
    runs_dir: RunsDir = Path("runs"),
    run_id: str | None = None,
    json: Json = False,
) -> int:
    """Start a new run from a committed checkpoint of another: RUN for the newest, or RUN@STEP.

    Parameters
    ----------
    run
        Parent run, optionally with @STEP.
    leg
        Leg of the parent.
    run_id
        Name of the new run folder.
    """
    from flows import run_request

    name, step = run_request.run_at_step(run)
    prepare_process(json)
    from engines import runs
    from flows.fork import fork as fork_flow
    from flows.fork import forked

    # A mistake is refused at once, before a server is started.
    forked(runs.open_run(name, runs_dir), step, set_, leg=leg)
    changes = run_request.as_overrides(set_)
    wanted = run_request.asked(run_request.ForkRequest, run=run, overrides=changes, leg=leg)
    place: dict[str, Any] = {"runs_dir": str(runs_dir), "run_id": run_id, "return_state": True}
    return finish(lambda: fork_flow(wanted, **place), json)


@app.command
def export(
    run: str,
    *,
    out: Path | None = None,
    leg: str = "a",
    runs_dir: RunsDir = Path("runs"),
    json: Json = False,
) -> int:
    """Write a committed checkpoint as a Hugging Face folder: RUN for the newest, or RUN@STEP.

    Parameters
    ----------
    run
        Run, optionally with @STEP.
    out
        New folder; RUN/LEG/exports/step-... when omitted.
    leg
        Leg of the run.
    """
    from flows import run_request

    name, step = run_request.run_at_step(run)
    prepare_process(json)
    from engines import runs
    from flows import console
    from flows.export import export as export_flow

    runs.checkpoint_at(runs.open_run(name, runs_dir) / leg, step)
    target = None if out is None else str(out)
    wanted = run_request.asked(run_request.ExportRequest, run=run, leg=leg, out=target)
    state = export_flow(wanted, runs_dir=str(runs_dir), return_state=True)
    return console.show_export(state, as_json=json)


@app.command
def verify(
    run: str,
    *,
    segment: int | None = None,
    leg: str = "a",
    runs_dir: RunsDir = Path("runs"),
    json: Json = False,
) -> int:
    """Run a locked pipeline again and name the stage whose output differs: Identical or Diverged.

    With --segment, one checkpoint interval alone.

    Parameters
    ----------
    run
        Run name or folder, or a lock.json.
    segment
        Number of the interval from 1: segment K is the steps from checkpoint K-1 to checkpoint K.
    leg
        Leg of the run.
    """
    prepare_process(json)
    from engines import runs
    from flows import run_request
    from flows.verify import verify as verify_flow
    from flows.verify_lock import verify_lock

    if not run.endswith(".json"):
        runs.open_run(run, runs_dir)
    if segment is None:
        lock = run_request.asked(run_request.VerifyLockRequest, lock=run, leg=leg)
        return finish(lambda: verify_lock(lock, runs_dir=str(runs_dir), return_state=True), json)
    wanted = run_request.asked(run_request.VerifyRequest, run=run, segment=segment, leg=leg)
    return finish(lambda: verify_flow(wanted, runs_dir=str(runs_dir), return_state=True), json)


@app.command
def diff(
    a: str,
    b: str | None = None,
    *,
    across: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    reproduce: Annotated[bool, Parameter(negative=())] = False,
    runs_dir: RunsDir = Path("runs"),
    json: Json = False,
) -> int:
    """Find the first wrong bit between two legs, runs, checkpoints, locks or MLflow runs.

    Parameters
    ----------
    a
        RUN, RUN/LEG, RUN/LEG@STEP (a checkpoint), a folder, a lock.json, or `mlflow:ID`.
    b
        The other side; when omitted, legs a and b of run A are compared.
    across
        What is expected to differ: fields or groups with commas between, such as
        `layout,trainer,optimizer.lr`.
    reproduce
        Run the step of the first difference again on both sides, from the nearest checkpoint, to
        name element, both values and their distance.
    """
    from flows import console

    names = (f"{a}/a", f"{a}/b") if b is None else (a, b)
    declared = with_commas(across)
    if not reproduce:
        return console.show_diff(names, across=declared, runs_dir=runs_dir, as_json=json)
    prepare_process(json)
    from flows.reproduce import reproduce as reproduce_flow

    state = reproduce_flow(
        run_a=names[0],
        run_b=names[1],
        across=declared,
        runs_dir=str(runs_dir),
        return_state=True,
    )
    return console.show_reproduction(state, as_json=json)


@app.command
def compare(
    *runs: str,
    tag: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    experiment: str | None = None,
    across: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    runs_dir: RunsDir = Path("runs"),
    run_id: str | None = None,
    json: Json = False,
) -> int:
    """Compare two or more legs and leave the outcome as a run: pages, plots, a run in MLflow.

    Parameters
    ----------
    runs
        RUN, RUN/LEG, a folder or `mlflow:ID`; all are compared with the first.
    tag
        Instead of names: all legs in MLflow that carry KEY=VALUE. Repeatable.
    experiment
        MLflow experiment that is searched by --tag; all when omitted.
    across
        What is expected to differ, with commas between.
    run_id
        Name of the comparison's folder.
    """
    from flows.run_request import CompareRequest, as_overrides, asked

    request = asked(
        CompareRequest,
        runs=runs,
        tags=as_overrides(tag),
        experiment=experiment,
        across=with_commas(across),
    )
    prepare_process(json)
    from flows.compare import compare as compare_flow

    return finish(
        lambda: compare_flow(request, runs_dir=str(runs_dir), run_id=run_id, return_state=True),
        json,
    )


@app.command
def show(run: str, *, runs_dir: RunsDir = Path("runs"), json: Json = False) -> int:
    """Show a run: its verdict, figures, legs and steps."""
    from flows import console

    return console.show_run(run, runs_dir=runs_dir, as_json=json)


@app.command
def drill(
    *,
    fault: tuple[str, ...] = (),
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    runs_dir: RunsDir = Path("runs"),
    run_id: str | None = None,
    json: Json = False,
) -> int:
    """Break ten live things on purpose, one after another, and show what catches each, and where.

    The exit code is 0 only when every fault was caught at its place and a clean run found nothing.

    Parameters
    ----------
    fault
        Run this fault instead. Repeatable; docs/faults.md lists all.
    every
        Run all faults.
    run_id
        Name of the new run folder.
    """
    from engines.drill.catalogue import DRILL, FAULTS, chosen_faults

    names = tuple(FAULTS) if every else fault or DRILL
    chosen_faults(names)  # a mistake is refused before anything is started
    prepare_process(json)
    from flows import console
    from flows.drill import drill as drill_flow

    state = drill_flow(names, runs_dir=str(runs_dir), run_id=run_id, return_state=True)
    return console.show_drill(state, as_json=json)


@app.command
def doctor(*, json: Json = False) -> int:
    """Check this machine and environment, and say how to mend what is wrong."""
    from flows import diagnosis

    return diagnosis.show(as_json=json)


def with_commas(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in texts that have commas between them."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def prepare_process(as_json: bool) -> None:
    """Switch telemetry off, mark this process for its guard, and route progress lines.

    They go to stdout, or to stderr when stdout must hold one JSON object alone.
    """
    from engines import guard
    from engines.environment import telemetry_off_env

    os.environ.update(telemetry_off_env())
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "true")
    # Expected verdicts must not print tracebacks; real errors are printed by `finish`.
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    guard.start()
    logger = logging.getLogger("lockstep")
    handler = logging.StreamHandler(sys.stderr if as_json else sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def finish(flow: Callable[[], Any], as_json: bool) -> int:
    """Run a flow and print its outcome; the exit code is that of its verdict."""
    from flows import console

    return console.show_outcome(flow(), as_json=as_json)


def main() -> None:
    """Entry point: maps every error of Lockstep's own tree to its exit code."""
    try:
        code = app(exit_on_error=False, print_error=True, result_action="return_value")
    except CycloptsError:
        code = SpecError.exit_code
    except LockstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print(
            "cancelled; `lockstep resume RUN` goes on from the newest checkpoint", file=sys.stderr
        )
        code = CancelledError.exit_code
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
