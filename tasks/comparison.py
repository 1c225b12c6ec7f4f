"""A comparison of two or more legs as a run of its own: folder, pages, and a run in MLflow.

Its folder is that of a run without legs: `verdict.json` says what was compared and found, beside
it lie the pages and plots. So `tracking.sync` sends it like any run, and again after an outage.

    pairs = compare_with_first(sides, across=("optimizer.lr",))
    outcome = write_outcome(runs.new_run(spec, runs_dir), sides, pairs)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.contracts import PROBES
from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.verdict import Verdict, worst
from engines.runs import Run, write_json
from model_specs.errors import SpecError
from tasks.compare import Outcome
from tasks.sides import MLFLOW_PREFIX, Side
from tasks.tracking_store import default_tracking_uri, find_runs

KIND = "comparison"
MAX_SIDES = 64
"""More runs than this are not compared by one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The first side and another one, compared."""

    a: Side
    b: Side
    comparison: Comparison


def legs_with_tags(
    tags: Mapping[str, str], *, experiment: str | None, runs_dir: Path
) -> tuple[str, ...]:
    """Return the names of all legs in MLflow that carry these tags, the oldest first.

    Args:
        tags: Tag -> value; `lockstep.` may be left out of a name.
        experiment: MLflow experiment; None looks in all.
        runs_dir: Folder beside which the default store lies.

    Raises:
        SpecError: Fewer than two legs carry the tags, or too many.
        LockstepError: The store cannot be read.
    """
    wanted = {name if "." in name else f"lockstep.{name}": value for name, value in tags.items()}
    uri = default_tracking_uri(runs_dir / "any run")
    found = find_runs(uri, experiment, {**wanted, "lockstep.kind": "leg"})
    if not 2 <= len(found) <= MAX_SIDES:
        shown = ", ".join(f"{name}={value}" for name, value in wanted.items())
        raise SpecError(
            f"{len(found)} legs in MLflow carry {shown}, and a comparison takes 2 to {MAX_SIDES}; "
            "name fewer tags, or one more"
        )
    return tuple(f"{MLFLOW_PREFIX}{run.run_id}" for run in reversed(found))


def compare_with_first(sides: Sequence[Side], *, across: Sequence[str] = ()) -> tuple[Pair, ...]:
    """Compare every other side with the first.

    Raises:
        SpecError: A side is not a leg, or there is only one.
        ArtifactError: A ledger is missing or damaged.
    """
    if len(sides) < 2:
        raise SpecError(f"a comparison takes at least two legs, not {len(sides)}")
    if sides[0].kind != "leg":
        raise SpecError(f"{sides[0].name} is a {sides[0].kind}; `lockstep diff` compares those")
    first, *others = sides
    return tuple(
        Pair(a=first, b=other, comparison=compare_ledgers(first.path, other.path, across=across))
        for other in others
    )


def decisive(pairs: Sequence[Pair]) -> Pair:
    """Return the pair whose verdict is the worst; of several Diverged the one that parts first."""
    verdict = worst(pair.comparison.verdict for pair in pairs)
    having = [pair for pair in pairs if pair.comparison.verdict is verdict]
    return min(having, key=lambda pair: _place(pair.comparison))


def _place(comparison: Comparison) -> tuple[int, int, int]:
    first = comparison.first
    if first is None:
        return (0, 0, 0)
    probe = PROBES.index(first.probe) if first.probe in PROBES else -1
    return (first.step, first.update, probe)


def write_outcome(
    run: Run, sides: Sequence[Side], pairs: Sequence[Pair], *, mlflow_command: str | None = None
) -> Outcome:
    """Write verdict.json of a comparison; the verdict is that of the decisive pair."""
    found = decisive(pairs)
    verdict = found.comparison.verdict
    details: dict[str, Any] = {
        "kind": KIND,
        "run_id": run.run_id,
        "folder": str(run.folder),
        "verdict": str(verdict),
        "exit_code": verdict.exit_code,
        "headline": _headline(found, pairs),
        "chain_digest": found.comparison.chain_digest,
        "first_divergence": str(found.comparison.first) if found.comparison.first else None,
        "mlflow_command": mlflow_command,
        "comparison": found.comparison.to_dict(),
        "sides": [{**asdict(side), "path": str(side.path)} for side in sides],
        "pairs": [
            {
                "a": pair.a.label,
                "b": pair.b.label,
                "verdict": str(pair.comparison.verdict),
                "headline": pair.comparison.headline,
            }
            for pair in pairs
        ],
        "legs": {},
    }
    run.fence.check()
    write_json(run.folder / "verdict.json", details)
    return Outcome(verdict=verdict, headline=str(details["headline"]), details=details)


def _headline(found: Pair, pairs: Sequence[Pair]) -> str:
    if len(pairs) == 1:
        return found.comparison.headline
    equal = sum(pair.comparison.verdict is Verdict.IDENTICAL for pair in pairs)
    text = f"{equal} of {len(pairs)} legs equal {found.a.label}"
    if found.comparison.verdict is Verdict.IDENTICAL:
        shortest = min(pair.comparison.common_steps for pair in pairs)
        return f"{text} over at least {shortest} steps"
    return f"{text}; {found.b.label}: {found.comparison.headline}"


def shown_legs(pairs: Sequence[Pair]) -> dict[str, Path]:
    """Return label -> folder of the decisive pair, as the page shows it."""
    found = decisive(pairs)
    same = found.a.label == found.b.label
    names = [f"{side.label} ({side.name})" if same else side.label for side in (found.a, found.b)]
    return dict(zip(names, (found.a.path, found.b.path), strict=True))
