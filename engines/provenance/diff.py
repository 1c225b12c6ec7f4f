"""Compare two ledgers: verdict, and the first step, update, probe, name and element to differ.

    comparison = compare_ledgers(run / "a", run / "b")
    comparison.verdict, comparison.headline, comparison.first

Invariants: bits are compared whenever the trajectories are equal, or differ only in what `across`
declares; a differing environment never changes the verdict, its differences are suspects; runs of
unequal length are compared on the steps that both have. Probes are in causal order, so that what
follows the first difference is its consequence. Side files are opened for the first difference
only (`descent`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engines.contracts import PROBES
from engines.provenance.completion_diff import CompletionDifference, first_differing_completion
from engines.provenance.descent import Divergence, descend, without_element
from engines.provenance.ledger import Ledger, LedgerLine, read_ledger, verify_ledger
from engines.provenance.verdict import Verdict
from model_specs.errors import ArtifactError, SpecError
from model_specs.json_text import jsonable, read_json
from model_specs.recorded_spec import Part, recorded, recorded_differences, recorded_fields
from model_specs.run_spec import RunSpec

ACROSS_GROUPS: Mapping[str, tuple[str, ...]] = {"layout": ("reduction",)}
"""Names that `across` knows beside the fields of a spec."""

ABSENT = "<absent>"
"""Stands for a fact that only one of two environments has."""

_NEVER_COMPARED = ("ambient", "fingerprint")

Difference = tuple[str, Any, Any]
"""(field, value in a, value in b)."""

RecordedSpec = Mapping[str, Any]
"""What spec.json holds, of whatever version."""
Specs = tuple[RecordedSpec | None, RecordedSpec | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How much was found equal or looked at, up to the first difference."""

    updates: int = 0
    probes: int = 0
    """Roots."""
    tensors: int = 0
    """Names under those roots: tensors, samples, prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of comparing two ledgers."""

    verdict: Verdict
    start_step: int = 0
    """Step after which the two are compared; above 0 where one of them begins later."""
    common_steps: int = 0
    """Steps that both have, line 0 not counted."""
    compared: Compared = Compared()
    first: Divergence | None = None
    chain_digest: str | None = None
    """Of the common prefix, when it is identical."""
    completion: CompletionDifference | None = None
    """The first completion with another token, at the first difference or as its consequence."""
    identity_differences: tuple[Difference, ...] = ()
    plan_differences: tuple[Difference, ...] = ()
    execution_differences: tuple[Difference, ...] = ()
    environment_differences: tuple[Difference, ...] = ()
    """Suspects; like those of plan and execution they never change the verdict."""
    note: str = ""

    @classmethod
    def incomparable(cls, note: str, differences: Sequence[Difference] = ()) -> Comparison:
        """Return the refusal to compare, and why."""
        return cls(verdict=Verdict.INCOMPARABLE, note=note, identity_differences=tuple(differences))

    @property
    def headline(self) -> str:
        """Say the outcome in one line."""
        if self.verdict is Verdict.DIVERGED:
            text = f"first difference at {self.first}"
        elif self.verdict is Verdict.IDENTICAL:
            text = (
                f"{self.common_steps} steps, {self.compared.updates} updates, "
                f"{self.compared.tensors} digests equal; chain {self.chain_digest}"
            )
        else:
            return self.note
        return f"{text} ({self.note})" if self.note else text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; floats that JSON lacks as `nan`, `inf`, `-inf`."""
        found: dict[str, Any] = jsonable(
            asdict(self) | {"verdict": self.verdict.value, "headline": self.headline}
        )
        return found


def compare_ledgers(
    folder_a: str | Path,
    folder_b: str | Path,
    *,
    across: Sequence[str] = (),
    spec_a: RunSpec | RecordedSpec | None = None,
    spec_b: RunSpec | RecordedSpec | None = None,
    ignoring: Sequence[str] = (),
    verify: bool = False,
) -> Comparison:
    """Compare the ledgers of two legs.

    Where one begins at a later step than the other (a fork, a segment that was run again), they
    are compared from its first step on.

    Args:
        folder_a: Folder of a leg, with `ledger.jsonl` and its side files.
        folder_b: Folder of the other.
        across: Fields, or groups of fields, in which the two are expected to differ.
        spec_a: Spec of the first; None reads `spec.json` beside or above its folder.
        spec_b: Spec of the second.
        ignoring: Probes that are not compared, because one of the two cannot have them.
        verify: Recompute roots and chains from the side files first.

    Raises:
        ArtifactError: a ledger is missing, damaged, or does not agree with its own side files.
        SpecError: `across` names a field that does not exist.
    """
    folder_a, folder_b = Path(folder_a), Path(folder_b)
    read = verify_ledger if verify else read_ledger
    a, b = read(folder_a), read(folder_b)
    specs = (_spec(folder_a, spec_a), _spec(folder_b, spec_b))
    differences: tuple[Difference, ...] = ()
    notes = [*a.notes, *b.notes]
    _check_across(across, specs)
    if a.header.trajectory != b.header.trajectory:
        differences = _identity_differences(a, b, specs)
        undeclared = [field for field, _, _ in differences if not _declared(field, across)]
        if undeclared:
            return Comparison.incomparable(
                f"the trajectories differ in {', '.join(undeclared)}; declare an expected "
                "difference with --across",
                differences,
            )
        notes.append(f"declared differences: {', '.join(field for field, _, _ in differences)}")
    found = _compare_lines((folder_a, folder_b), (a, b), specs, notes=notes, ignoring=ignoring)
    return replace(
        found,
        identity_differences=differences,
        plan_differences=_differences(specs, "plan"),
        execution_differences=_differences(specs, "execution"),
        environment_differences=_environment_differences(folder_a, folder_b),
    )


def common_lines(a: Ledger, b: Ledger) -> tuple[Sequence[LedgerLine], Sequence[LedgerLine]]:
    """Return the lines of two ledgers from the first that both can have.

    Where one begins at a later step, as that of a fork does, its first line is the state that it
    begins with and no update: both are compared from the step after it.
    """
    start = max(a.header.start_step, b.header.start_step)
    if a.header.start_step == b.header.start_step:
        return a.lines, b.lines
    found = [[line for line in ledger.lines if line.step > start] for ledger in (a, b)]
    return found[0], found[1]


def _compare_lines(
    folders: tuple[Path, Path],
    ledgers: tuple[Ledger, Ledger],
    specs: Specs,
    *,
    notes: list[str],
    ignoring: Sequence[str],
) -> Comparison:
    a, b = ledgers
    lines_a, lines_b = common_lines(a, b)
    start = max(a.header.start_step, b.header.start_step)
    same_start = a.header.start_step == b.header.start_step
    if not same_start:
        notes.append(f"compared from step {start + 1} on, where the later one begins")
    pairs = list(zip(lines_a, lines_b, strict=False))
    common_steps = max((min(x.step, y.step) for x, y in pairs), default=start) - start
    if len(lines_a) != len(lines_b):
        notes.append(
            f"{len(lines_a)} and {len(lines_b)} updates: compared on the {len(pairs)} in common"
        )
    updates = probes = tensors = 0
    first: Divergence | None = None
    for x, y in pairs:
        found = _first_probe(x, y, ignoring)
        equal = PROBES if found is None else PROBES[: PROBES.index(found)]
        looked_at = [probe for probe in equal if probe not in ignoring]
        probes += sum(probe in x.roots for probe in looked_at)
        tensors += sum(x.counts.get(probe, 0) for probe in looked_at)
        if x.key != y.key:
            first = without_element(x, None, f"the next update is {x.key} in a and {y.key} in b")
        elif found is not None:
            first = descend(folders, x, y, found, _last_step(ledgers, specs))
        if first is not None:
            break
        if same_start and not ignoring and x.chain != y.chain:
            raise ArtifactError(
                f"step {x.step} update {x.update}: all roots are equal but the chains are recorded "
                f"as {x.chain} ({folders[0]}) and {y.chain} ({folders[1]}); verify both ledgers"
            )
        updates += 1
    verdict = Verdict.DIVERGED if first else Verdict.IDENTICAL
    if first is None and common_steps == 0:
        verdict = Verdict.VACUOUS
        notes.append("the two have no step in common, so nothing was compared")
    return Comparison(
        verdict=verdict,
        start_step=start,
        common_steps=common_steps,
        compared=Compared(updates=updates, probes=probes, tensors=tensors),
        first=first,
        completion=first_differing_completion(folders, pairs) if first else None,
        chain_digest=pairs[-1][0].chain if verdict is Verdict.IDENTICAL else None,
        note="; ".join(notes),
    )


def _first_probe(a: LedgerLine, b: LedgerLine, ignoring: Sequence[str]) -> str | None:
    compared = (probe for probe in PROBES if probe not in ignoring)
    return next((probe for probe in compared if a.roots.get(probe) != b.roots.get(probe)), None)


def _last_step(ledgers: tuple[Ledger, Ledger], specs: Specs) -> int:
    planned = [(spec.get("plan") or {}).get("num_steps") for spec in specs if spec is not None]
    known = [steps for steps in planned if isinstance(steps, int)]
    return max([ledgers[0].last_step, ledgers[1].last_step, *known])


def _spec(folder: Path, given: RunSpec | RecordedSpec | None) -> RecordedSpec | None:
    """The spec as JSON: one that this version does not take is still compared with."""
    if given is not None:
        return recorded(given) if isinstance(given, RunSpec) else given
    for path in (folder / "spec.json", folder.parent / "spec.json"):
        if path.is_file():
            return read_json(path)
    return None


def _differences(specs: Specs, part: Part) -> tuple[Difference, ...]:
    a, b = specs
    return () if a is None or b is None else recorded_differences(a, b, part=part)


def _identity_differences(a: Ledger, b: Ledger, specs: Specs) -> tuple[Difference, ...]:
    found = _differences(specs, "trajectory")
    # Specs that are missing, or equal while the ledgers' fingerprints are not, explain nothing.
    return found or (("trajectory", a.header.trajectory, b.header.trajectory),)


def _declared(field: str, across: Sequence[str]) -> bool:
    names = [name for entry in across for name in ACROSS_GROUPS.get(entry, (entry,))]
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _check_across(across: Sequence[str], specs: Specs) -> None:
    given = [spec for spec in specs if spec is not None]
    known = [field for spec in given for field in recorded_fields(spec, part="trajectory")]
    for entry in across:
        if known and not any(_declared(field, (entry,)) for field in known):
            groups = sorted({field.partition(".")[0] for field in known} | set(ACROSS_GROUPS))
            raise SpecError(
                f"--across {entry!r} is no identity field; name one such as optimizer.lr, or a "
                f"group: {', '.join(groups)}"
            )


def _environment_differences(folder_a: Path, folder_b: Path) -> tuple[Difference, ...]:
    a, b = (dict(_facts(folder)) for folder in (folder_a, folder_b))
    return tuple(
        (field, a.get(field, ABSENT), b.get(field, ABSENT))
        for field in sorted(a.keys() | b.keys())
        if a.get(field, ABSENT) != b.get(field, ABSENT)
    )


def _facts(folder: Path) -> Iterator[tuple[str, Any]]:
    path = folder / "environment.json"
    if path.is_file():
        try:
            yield from _flat("", json.loads(path.read_bytes()))
        except ValueError as error:
            raise ArtifactError(f"{path} is not JSON: {error}") from error


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            if key not in _NEVER_COMPARED:
                yield from _flat(f"{prefix}.{key}" if prefix else key, value[key])
    else:
        yield prefix, value
