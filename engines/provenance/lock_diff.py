"""Compare the locks of two legs: the first stage that was given or gave something else.

    found = compare_locks(leg_a, leg_b)
    found.verdict, found.headline

Invariants: rows are paired by stage in the order in which stages ended, so what follows the first
difference is its consequence; a row that an attempt wrote again with the same content (a resume
downloads and converts once more) counts once. Times and places are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.provenance.lock import LockRow, read_lock
from engines.provenance.verdict import Verdict

Row = tuple[str, LockRow]
"""Stage with its number among those of its name, and the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDifference:
    """The first stage whose row differs."""

    stage: str
    """Name, with `#2` for the second of that name."""
    what: str
    """`version`, `input NAME`, `output NAME`, or `row`."""
    value_a: str | None
    """None where a has none."""
    value_b: str | None

    def __str__(self) -> str:
        """Say everything in one line."""
        return f"stage {self.stage}, {self.what}: {self.value_a} | {self.value_b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockComparison:
    """The outcome of comparing two locks."""

    verdict: Verdict
    stages: int = 0
    """Stages found equal before the first difference."""
    digests: int = 0
    """Inputs and outputs of those."""
    first: StageDifference | None = None
    environment_differences: tuple[tuple[str, str, str], ...] = ()
    """(stage, fingerprint in a, in b): suspects, which never change the verdict."""
    note: str = ""

    @property
    def headline(self) -> str:
        """Say the outcome in one line."""
        if self.first is not None:
            text = f"first difference at {self.first}"
        else:
            text = f"{self.stages} stages, {self.digests} digests equal"
        return f"{text} ({self.note})" if self.note else text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"verdict": str(self.verdict), "headline": self.headline}


def compare_locks(
    folder_a: str | Path, folder_b: str | Path, *, across: Sequence[str] = ()
) -> LockComparison:
    """Compare two locks stage by stage.

    Args:
        folder_a: Folder of a leg, or its lock file.
        folder_b: The other.
        across: Given at all, the trajectories may differ.

    Raises:
        ArtifactError: A lock is missing or damaged.
    """
    a, b = (read_lock(_folder(path)) for path in (folder_a, folder_b))
    trajectories = [{row.trajectory for row in rows} for rows in (a, b)]
    if trajectories[0] != trajectories[1] and not across:
        return LockComparison(
            verdict=Verdict.INCOMPARABLE,
            note="the trajectories differ; compare the legs to see in what, and declare it with "
            "--across",
        )
    stages = digests = 0
    environments: list[tuple[str, str, str]] = []
    rows_a, rows_b = dict(_numbered(a)), dict(_numbered(b))
    for name in dict.fromkeys((*rows_a, *rows_b)):
        x, y = rows_a.get(name), rows_b.get(name)
        first = _difference(name, x, y)
        if first is not None:
            return LockComparison(
                verdict=Verdict.DIVERGED,
                stages=stages,
                digests=digests,
                first=first,
                environment_differences=tuple(environments),
            )
        assert x is not None
        assert y is not None
        stages += 1
        digests += len(x.inputs) + len(x.outputs)
        if x.environment != y.environment:
            environments.append((name, x.environment, y.environment))
    return LockComparison(
        verdict=Verdict.IDENTICAL if digests else Verdict.VACUOUS,
        stages=stages,
        digests=digests,
        environment_differences=tuple(environments),
        note="" if digests else "no stage recorded a digest, so nothing was compared",
    )


def _folder(path: str | Path) -> Path:
    return Path(path).parent if Path(path).is_file() else Path(path)


def _numbered(rows: Sequence[LockRow]) -> list[Row]:
    numbered: list[Row] = []
    counts: dict[str, int] = {}
    seen: list[tuple[Any, ...]] = []
    for row in rows:
        content = (row.stage, row.version, dict(row.inputs), dict(row.outputs))
        if content in seen:
            continue
        seen.append(content)
        counts[row.stage] = counts.get(row.stage, 0) + 1
        number = counts[row.stage]
        numbered.append((row.stage if number == 1 else f"{row.stage}#{number}", row))
    return numbered


def _difference(name: str, a: LockRow | None, b: LockRow | None) -> StageDifference | None:
    def found(what: str, x: str | None, y: str | None) -> StageDifference:
        return StageDifference(stage=name, what=what, value_a=x, value_b=y)

    if a is None or b is None:
        there = ("absent" if row is None else "there" for row in (a, b))
        return found("row", *there)
    if a.version != b.version:
        return found("version", str(a.version), str(b.version))
    for kind, x, y in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        key = _first_key(x, y)
        if key is not None:
            return found(f"{kind} {key}", x.get(key), y.get(key))
    return None


def _first_key(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    return next((key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)), None)
