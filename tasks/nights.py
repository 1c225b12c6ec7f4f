"""What a night claims: one row a comparison, each with its verdict and its suspects.

    rows = (
        twin_row(run.folder),
        resume_row(run.folder, middle=4),
        baseline_row(run.folder, found, commit=commit),
        alignment_row(legs),
    )
    outcome = worst_row(rows)

A row without a verdict compared nothing; it says so and is never counted as equal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.provenance.diff import Comparison, compare_ledgers
from engines.provenance.suspects import Difference, Suspect, rank_suspects
from engines.provenance.verdict import Verdict, worst
from engines.runs import legs, read_spec
from model_specs.errors import LockstepError
from model_specs.json_text import read_json
from model_specs.recorded_spec import recorded, recorded_differences
from model_specs.run_spec import RunSpec
from model_specs.variation import Variation
from tasks.baseline import Baseline, device_of, find_baseline, has_environment
from tasks.compare import LegResult, compare_legs
from tasks.tracked_folder import git_tags
from tasks.tracking import sync_unsent

NO_BASELINE = "no baseline"

DECLARED = {
    "threads": (r"threads$", r"variables\.(OMP|MKL)_NUM_THREADS$"),
    "rollout_engines": (r"^engine rollout\.rollout-\d+$",),
}
"""Field of the variation -> patterns of the facts of the environment that it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim of the night."""

    name: str
    verdict: Verdict | None
    """None: nothing was compared."""
    summary: str
    comparison: Comparison | None = None
    suspects: tuple[Suspect, ...] = ()
    commands: tuple[str, ...] = ()
    sides: Mapping[str, Path] = field(default_factory=dict)
    """Leg, as `lockstep diff` takes it -> its folder; empty where nothing was compared."""

    @property
    def label(self) -> str:
        """The verdict, or what stands in its place."""
        return str(self.verdict) if self.verdict is not None else self.summary.partition(":")[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for verdict.json and the pages."""
        return {
            "name": self.name,
            "verdict": None if self.verdict is None else str(self.verdict),
            "label": self.label,
            "summary": self.summary,
            "first_divergence": self._first(),
            "suspects": [str(suspect) for suspect in self.suspects],
            "commands": list(self.commands),
        }

    def _first(self) -> str | None:
        first = self.comparison.first if self.comparison else None
        return None if first is None else str(first)


def compare_night(
    folder: Path, legs: Sequence[LegResult], *, variation: Variation
) -> tuple[Row, ...]:
    """Make all comparisons of a night.

    Args:
        folder: Tonight's run folder.
        legs: Results of legs a, b and resume.
        variation: What leg b was run under.
    """
    ended = {leg.leg for leg in legs if leg.chain_digest}
    return (
        *((_twin_row(folder, variation),) if {"a", "b"} <= ended else ()),
        *((_resume_row(folder),) if {"a", "resume"} <= ended else ()),
        *((baseline_row(folder),) if "a" in ended else ()),
        _alignment_row(legs),
    )


def _twin_row(folder: Path, variation: Variation) -> Row:
    found = compare_legs(folder, "a", "b")
    changed = tuple(
        pattern
        for field, patterns in DECLARED.items()
        if getattr(variation, field) is not None
        for pattern in patterns
    )
    return _row(
        "a = b",
        found,
        suspects=rank_suspects(found.environment_differences, declared=changed),
        sides={f"{folder.name}/a": folder / "a", f"{folder.name}/b": folder / "b"},
    )


def _resume_row(folder: Path) -> Row:
    found = compare_legs(folder, "a", "resume")
    return _row(
        "resume = a",
        found,
        suspects=rank_suspects(found.environment_differences),
        sides={f"{folder.name}/a": folder / "a", f"{folder.name}/resume": folder / "resume"},
    )


def baseline_row(folder: Path) -> Row:
    """Compare tonight's leg a with the baseline, and rank what has changed since."""
    name = "tonight = baseline"
    spec = read_spec(folder)
    sync_unsent(folder.parent)  # a night that the store missed would be passed over
    try:
        baseline = find_baseline(folder, spec, device=device_of(folder))
    except LockstepError as error:  # not the same as having none: something could not be read
        return _row(name, Comparison.incomparable(f"the baseline was not found: {error}"))
    if baseline.folder is None:
        return Row(name=name, verdict=None, summary=f"{NO_BASELINE}: {baseline.note}")
    try:
        found = compare_ledgers(baseline.folder / "a", folder / "a")
        changes = [*found.environment_differences, *_other_changes(baseline, spec)]
    except LockstepError as error:
        found, changes = Comparison.incomparable(f"it cannot be compared: {error}"), []
    return _row(
        f"tonight = {baseline.run_id}",
        found,
        note=baseline.note,
        suspects=rank_suspects(changes),
        sides={
            f"{baseline.run_id}/a": baseline.folder / "a",
            f"{folder.name}/a": folder / "a",
        },
    )


def _other_changes(baseline: Baseline, spec: RunSpec) -> list[Difference]:
    """Return plan and execution fields, and the commit, that are not what they were."""
    assert baseline.folder is not None
    # As JSON: a field that has gone since is a suspect, and no reason not to compare.
    before, now = read_json(baseline.folder / "spec.json"), recorded(spec)
    changes: list[Difference] = list(recorded_differences(before, now, part="plan"))
    changes += [
        difference
        for difference in recorded_differences(before, now, part="execution")
        if difference[0].startswith("execution.")
    ]
    commit = commit_of_this_code()
    if baseline.commit != commit:
        changes.append(("git.commit", baseline.commit, commit))
    return changes


def commit_of_this_code() -> str | None:
    """Return the commit of the checkout that runs; None where it is none."""
    return git_tags(Path(__file__)).get("git.commit")


def _alignment_row(legs: Sequence[LegResult]) -> Row:
    """Whether the trained policy was the one that sampled, in every leg."""
    name = "train = rollout"
    claimed = [leg for leg in legs if not leg.on_report]
    if not claimed:
        return Row(name=name, verdict=None, summary="on report: no alignment is claimed")
    verdict = worst(leg.verdict for leg in claimed)
    red = [f"leg {leg.leg}: {leg.reason}" for leg in claimed if leg.verdict == verdict]
    tokens = sum(_tokens(leg) for leg in claimed)
    summary = f"largest log-prob difference 0.0 over {tokens} tokens of {len(claimed)} legs"
    return Row(name=name, verdict=verdict, summary=summary if verdict.is_green else "; ".join(red))


def _tokens(leg: LegResult) -> int:
    return int(leg.gates.get("logprobs", {}).get("figures", {}).get("num_tokens", 0))


def _row(
    name: str,
    found: Comparison,
    *,
    note: str = "",
    suspects: tuple[Suspect, ...] = (),
    sides: Mapping[str, Path] | None = None,
) -> Row:
    return Row(
        name=name,
        verdict=found.verdict,
        summary=f"{note}: {found.headline}" if note else found.headline,
        comparison=found,
        suspects=suspects,
        commands=()
        if found.verdict.is_green or not sides
        else (f"lockstep diff {' '.join(sides)}",),
        sides=sides or {},
    )


def decisive(rows: Sequence[Row]) -> Row | None:
    """Return the first row with the worst verdict of those that compared something."""
    compared = [row for row in rows if row.comparison is not None]
    verdict = worst(row.comparison.verdict for row in compared if row.comparison is not None)
    return next((row for row in compared if row.verdict == verdict), None)


def shown_legs(folder: Path, rows: Sequence[Row]) -> dict[str, Path]:
    """Return the legs of the report: first the two that decide, then the others of the night."""
    row = decisive(rows)
    shown = dict(row.sides) if row is not None else {}
    return shown | {f"{folder.name}/{leg}": folder / leg for leg in legs(folder)}


def about(rows: Sequence[Row]) -> str:
    """Say in front of the headline what it is about: the red row, or all that were compared."""
    row = decisive(rows)
    if row is None or row.verdict is None or row.verdict.is_green:
        return ", ".join(row.name if row.verdict else row.label for row in rows)
    undeclared = [suspect for suspect in row.suspects if not suspect.declared]
    suspect = f", first suspect {undeclared[0]}" if undeclared else ""
    return f"{row.name}{suspect}"


def night_details(
    folder: Path, rows: Sequence[Row], *, variation: Variation, resumed_at: int
) -> dict[str, Any]:
    """Return what verdict.json says of a night, under `night`."""
    row = decisive(rows)
    red = row is not None and row.verdict is not None and not row.verdict.is_green
    suspects = [s for s in row.suspects if not s.declared] if row is not None and red else []
    spec = read_spec(folder)
    return {
        "ended_at": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "recipe": spec.recipe,
        "num_steps": spec.plan.num_steps,
        "resumed_at": resumed_at,
        "device_class": device_of(folder) if has_environment(folder) else None,
        "commit": commit_of_this_code(),
        "variation": {"seed": variation.seed, "varied": [list(r) for r in variation.describe()]},
        "rows": [found.to_dict() for found in rows],
        "decisive": None if row is None else row.name,
        "first_suspect": str(suspects[0]) if suspects else None,
    }
