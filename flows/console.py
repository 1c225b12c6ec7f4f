"""What the command line prints: outcomes, runs and differences, for people and as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engines.provenance.ledger import read_ledger
from engines.provenance.verdict import Verdict
from engines.runs import legs, open_run, read_spec
from flows.difference import OUT, print_difference, print_evidence
from model_specs.errors import LockstepError
from model_specs.json_text import read_json
from tasks.sides import compare_sides, open_sides

SHOWN_SUSPECTS = 5
ERR = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, stderr=True)


def show_outcome(state: Any, *, as_json: bool) -> int:
    """Print how a flow run ended; returns the exit code of its verdict."""
    details = _details(state)
    if details is None:
        return 1
    folder = Path(details["folder"])
    if as_json:
        OUT.print_json(json.dumps(details, default=str))
    elif details["verdict"] is None:
        OUT.print(details["headline"])
        OUT.print(f"run folder    {folder}")
    else:
        print_run(folder, details)
    return int(details["exit_code"])


def show_export(state: Any, *, as_json: bool) -> int:
    """Print where a checkpoint was exported to; returns the exit code."""
    details = _details(state)
    if details is None:
        return 1
    if as_json:
        OUT.print_json(json.dumps(details))
    else:
        source = f"{details['run_id']}/{details['leg']}@{details['step']}"
        OUT.print(f"exported {source} to {details['folder']}")
        OUT.print(f"state {details['state_digest']}")
        OUT.print(f"tensors {details['digest']}")
    return 0


def show_drill(state: Any, *, as_json: bool) -> int:
    """Print what a drill caught; 0 only when that is everything, and nothing without a fault."""
    details = state.result(raise_on_failure=False)
    details = getattr(details, "details", details)
    if isinstance(details, LockstepError):
        raise details
    if not isinstance(details, Mapping):
        if isinstance(details, BaseException):
            traceback.print_exception(details)
        ERR.print(f"The flow ended as {state.name}: {state.message}")
        return 1
    if as_json:
        OUT.print_json(json.dumps(details))
        return int(details["exit_code"])
    for alarm in details["false_alarms"]:
        OUT.print(
            f"FALSE ALARM without a fault: {alarm['by']}, {alarm['where']}: {alarm['detail']}"
        )
    OUT.print(details["headline"])
    OUT.print(f"run folder    {details['folder']}")
    return int(details["exit_code"])


def change_baseline(
    run: str, *, runs_dir: Path, reason: str | None = None, unset: bool = False, as_json: bool
) -> int:
    """Set or unset an explicit baseline and print what was done; returns the exit code."""
    from tasks.baseline import set_baseline, unset_baseline

    folder = open_run(run, runs_dir)
    done = unset_baseline(folder) if unset else set_baseline(folder, reason=reason)
    if as_json:
        OUT.print_json(json.dumps({"run_id": folder.name, "done": done}))
    else:
        for line in done:
            OUT.print(line)
    return 0


def show_baselines(run: str | None, *, runs_dir: Path, as_json: bool) -> int:
    """Print the explicit baselines, or what the next night of a trajectory is compared with."""
    from tasks.baseline import device_of, explicit_baselines, find_baseline

    if run is not None:
        folder = open_run(run, runs_dir)
        found = find_baseline(folder, read_spec(folder), device=device_of(folder), own=True)
        if as_json:
            values = {"run_id": found.run_id, "explicit": found.is_explicit, "note": found.note}
            OUT.print_json(json.dumps(values))
        else:
            OUT.print(found.note if found.run_id else f"no baseline: {found.note}")
        return 0
    tags = [dict(baseline.tags) for baseline in explicit_baselines(runs_dir)]
    if as_json:
        OUT.print_json(json.dumps(tags))
        return 0
    for found_tags in tags:
        reason = found_tags.get("lockstep.baseline_reason")
        OUT.print(
            f"{found_tags['lockstep.run_id']}  {found_tags['lockstep.verdict']}  "
            f"{found_tags['lockstep.recipe']} on {found_tags['lockstep.device_class']}  since "
            f"{found_tags['lockstep.baseline']}" + (f"  because {reason}" if reason else "")
        )
    if not tags:
        OUT.print("no explicit baseline: every night is compared with the last green night")
    return 0


def show_sync(run: str | None, *, runs_dir: Path, as_json: bool) -> int:
    """Send a run, or all that MLflow does not have, and print their names; returns the exit code.

    Raises:
        LockstepError: The store did not take everything.
    """
    from tasks.tracking import sync_again, sync_unsent

    sent, problems = sync_again([open_run(run, runs_dir)]) if run else sync_unsent(runs_dir)
    if as_json:
        OUT.print_json(json.dumps({"sent": sent, "problems": problems}))
    else:
        OUT.print(f"sent: {', '.join(sent)}" if sent else "nothing was sent")
    if problems:
        raise LockstepError("; ".join(problems))
    return 0


def show_run(run: str, *, runs_dir: Path, as_json: bool) -> int:
    """Print a run that exists; the exit code is that of its verdict."""
    folder = open_run(run, runs_dir)
    path = folder / "verdict.json"
    if not path.is_file():
        if as_json:
            OUT.print_json(
                json.dumps({"run_id": folder.name, "verdict": None, "legs": legs(folder)})
            )
        else:
            OUT.print(f"{folder.name}: no verdict yet; legs: {', '.join(legs(folder)) or 'none'}")
        return Verdict.VACUOUS.exit_code
    details = read_json(path)
    if as_json:
        OUT.print_json(json.dumps(details))
    else:
        print_run(folder, details)
        origin = read_json(folder / "spec.json").get("origin")
        if origin is not None:
            OUT.print(f"forked from   {origin['run']}/{origin['leg']}@{origin['step']}")
        for leg in legs(folder):
            OUT.print(_steps_table(folder / leg, leg))
    return int(details["exit_code"])


def print_run(folder: Path, details: Mapping[str, Any]) -> None:
    """Print legs, gates, controls and the verdict of a run."""
    for name, leg in details["legs"].items():
        processes = ", ".join(
            f"{engine} pid {facts['pid']:.0f} started {_clock_time(facts['started_at'])}"
            for engine, facts in leg["processes"].items()
        )
        OUT.print(f"leg {name}: {processes}; cached stages {leg['cached_stages']}")
        for gate, facts in leg["gates"].items():
            OUT.print(f"leg {name} {gate}: {facts['verdict']}, {facts['summary']}")
    OUT.print()
    green = Verdict(details["verdict"]).is_green
    OUT.print(Text(details["verdict"], style="bold green" if green else "bold red"))
    OUT.print(details["headline"])
    if details.get("comparison"):
        print_evidence(details["comparison"])
    for row in (details.get("night") or {}).get("rows", ()):
        OUT.print(f"  {row['label']:<13} {row['name']}")
        for rank, suspect in enumerate(row["suspects"][:SHOWN_SUSPECTS], start=1):
            if row["verdict"] is not None and not Verdict(row["verdict"]).is_green:
                OUT.print(f"                suspect {rank}: {suspect}")
    for output in details.get("stages", ()):
        reached = "DIFFERS" if output["found"] is not None else "not run"
        found = "equal" if output["equal"] else reached
        OUT.print(
            f"  {found:<7} {output['how']:<5} {output['stage']} {output['output']} "
            f"{output['locked'][:12]}"
        )
    if details["chain_digest"]:
        OUT.print(f"chain digest  {details['chain_digest']}")
    alignment, native = details.get("alignment"), details.get("native_control")
    if alignment:
        OUT.print(
            f"alignment     max {alignment['max_abs_diff']} over {alignment['num_tokens']} tokens, "
            f"{alignment['exact_fraction']:.2%} exactly equal"
        )
    if native:
        OUT.print(f"beside it     native ops: {native['verdict']}, max {native['max_abs_diff']}")
    OUT.print(f"run folder    {folder}")
    if details.get("mlflow_command"):
        OUT.print(f"MLflow        {details['mlflow_command']}")


def _details(state: Any) -> Mapping[str, Any] | None:
    """What a flow run ended with; None, and its error printed, where that is no record of ours."""
    from flows.conclusion import RedVerdictError  # `diff` and `show` load no Prefect

    details = state.result(raise_on_failure=False)
    if isinstance(details, RedVerdictError):
        details = details.details
    if isinstance(details, LockstepError):
        raise details
    if isinstance(details, Mapping):
        return details
    if isinstance(details, BaseException):
        traceback.print_exception(details)
    ERR.print(f"The flow ended as {state.name}: {state.message}")
    return None


def show_diff(names: Sequence[str], *, across: Sequence[str], runs_dir: Path, as_json: bool) -> int:
    """Compare two legs, checkpoints or locks; the exit code is that of the verdict."""
    with open_sides(names, runs_dir) as (a, b):
        comparison = compare_sides(a, b, across=across)
        if as_json:
            labels = {"a": a.label, "b": b.label}
            OUT.print_json(json.dumps({**comparison.to_dict(), "sides": labels}, default=str))
        else:
            OUT.print(f"a: {a.kind} {a.label}\nb: {b.kind} {b.label}")
            print_difference(comparison.to_dict())
    return comparison.verdict.exit_code


def show_reproduction(state: Any, *, as_json: bool) -> int:
    """Print what came of running a step again; the exit code is that of the records' verdict."""
    details = _details(state)
    if details is None:
        return 1
    if as_json:
        OUT.print_json(json.dumps(details, default=str))
    else:
        print_difference(details)
        for again in details.get("replays", ()):
            OUT.print(again["summary"])
    return Verdict(details["verdict"]).exit_code


def _steps_table(leg_folder: Path, leg: str) -> Table:
    table = Table(f"leg {leg}", "reward", "grad", "gate max", "exact", "chain", box=None)
    for line in read_ledger(leg_folder).lines:
        metrics = line.metrics
        if "reward/mean" not in metrics:
            continue
        table.add_row(
            str(line.step),
            f"{metrics['reward/mean']:.3f}",
            f"{metrics.get('train/grad_norm', 0.0):.3g}",
            repr(metrics["gate/logprob_abs_diff/max"]),
            f"{metrics['gate/exact_fraction']:.4f}",
            line.chain[:12],
        )
    return table


def _clock_time(seconds: float) -> str:
    import time

    return time.strftime("%H:%M:%S", time.localtime(seconds))
