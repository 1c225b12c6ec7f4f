"""From a differing root down: the name under it, the element under the name, both values.

Side files are opened here, for the first difference only: digests by name, values of samples, and
tensors where they were kept.

    first = descend((leg_a, leg_b), line_a, line_b, "grads", last_step=8)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engines.provenance.element_diff import (
    ElementDifference,
    Elements,
    Histogram,
    diff_elements,
    elements_of,
    load_tensor,
)
from engines.provenance.ledger import TOKEN_PROBES, LedgerLine
from engines.provenance.side_files import read_digests, read_values, tensors_path
from model_specs.errors import ArtifactError


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference, as far down as the evidence goes."""

    step: int
    update: int
    probe: str
    name: str | None
    """Tensor, sample or prompt."""
    element: tuple[int, ...] | None
    value_a: float | int | None
    value_b: float | int | None
    hex_a: str | None
    """Storage bits."""
    hex_b: str | None
    ulp: int | None
    """Distance in units in the last place, as `element_diff` defines it."""
    num_differing: int | None
    """Elements of this name that differ."""
    num_elements: int | None
    max_ulp: int | None
    detail: str
    ulp_histogram: Histogram = ()
    """Of all elements of this name that differ; empty where the element is not known."""

    @property
    def place(self) -> str:
        """Where it is, without the element."""
        where = f"step {self.step} update {self.update} {self.probe}"
        return where if self.name is None else f"{where} {self.name}"

    def __str__(self) -> str:
        """Say everything in one line."""
        where = self.place
        if self.element is None:
            return f"{where}: {self.detail}"
        index = ", ".join(str(i) for i in self.element)
        values = f"{self.value_a!r} ({self.hex_a}) | {self.value_b!r} ({self.hex_b})"
        distance = f", {self.ulp} ULP" if self.ulp is not None else ""
        largest = f", max {self.max_ulp} ULP" if self.max_ulp is not None else ""
        return (
            f"{where}[{index}]: {values}{distance}; {self.num_differing} of {self.num_elements} "
            f"elements differ{largest}; {self.detail}"
        )


def descend(
    folders: tuple[Path, Path], a: LedgerLine, b: LedgerLine, probe: str, last_step: int
) -> Divergence:
    """Find the first name under a differing root, and the element under the name.

    Args:
        folders: Folders of the two legs.
        a: Line of the first leg.
        b: The same update of the second.
        probe: Probe whose roots differ.
        last_step: Last planned step of both, to say what would have kept the tensors.

    Raises:
        ArtifactError: Side files are missing, or do not explain the difference.
    """
    for side, line in (("b", a), ("a", b)):
        if probe not in line.roots:
            return without_element(line, probe, f"only {side} has this probe")
    alone = [str(folder) for folder in folders if not (folder / "digests").is_dir()]
    if alone:
        return without_element(
            a,
            probe,
            f"the name is not known, since only the ledger is in {' and '.join(alone)}: compare "
            "where the run folders lie",
        )
    digests_a = read_digests(folders[0], a.step, a.update).get(probe, {})
    digests_b = read_digests(folders[1], b.step, b.update).get(probe, {})
    names = sorted(digests_a.keys() | digests_b.keys(), key=natural_order)
    unequal = [name for name in names if digests_a.get(name) != digests_b.get(name)]
    if not unequal:
        raise ArtifactError(
            f"step {a.step} update {a.update}: the roots of {probe} differ but the digests beside "
            f"both ledgers are equal; verify {folders[0]} and {folders[1]}"
        )
    name = unequal[0]
    detail = f"{len(unequal)} of {len(names)} names differ"
    for side, digests in (("b", digests_a), ("a", digests_b)):
        if name not in digests:
            return without_element(a, probe, f"only {side} has this name; {detail}", name=name)
    return _element(folders, a, probe, name, detail=detail, last_step=last_step)


def _element(
    folders: tuple[Path, Path],
    line: LedgerLine,
    probe: str,
    name: str,
    *,
    detail: str,
    last_step: int,
) -> Divergence:
    values = [
        read_values(folder, line.step, line.update).get(probe, {}).get(name) for folder in folders
    ]
    paths = [tensors_path(folder, line.step, line.update, probe) for folder in folders]
    if values[0] is not None and values[1] is not None:
        return _sample_element(line, probe, name, values[0], values[1], detail)
    missing = [
        str(folder) for folder, path in zip(folders, paths, strict=True) if not path.is_file()
    ]
    if missing:
        keep = last_step - line.step + 1
        return without_element(
            line,
            probe,
            f"{detail}; the element is not known, since the tensors of this step were not kept in "
            f"{' and '.join(missing)}: `lockstep diff A B --reproduce` runs the step again, "
            f"and a run with --set plan.keep_tensor_steps={keep} keeps them",
            name=name,
        )
    if probe == "optimizer" and name == "step":
        reason = f"{detail}; of the number of optimizer steps only its digest is kept"
        return without_element(line, probe, reason, name=name)
    a, b = (load_tensor(path, name) for path in paths)
    return _element_difference(line, probe, name, a, b, detail)


def _sample_element(
    line: LedgerLine,
    probe: str,
    name: str,
    a: Sequence[float | int],
    b: Sequence[float | int],
    detail: str,
) -> Divergence:
    length = min(len(a), len(b))
    both_lengths = f"lengths {len(a)} | {len(b)}; " if len(a) != len(b) else ""
    # Both sides in one array, so that both are given the same dtype.
    both = elements_of([*a[:length], *b[:length]])
    kind = "first differing token; " if probe in TOKEN_PROBES else ""
    difference = diff_elements(
        Elements(bits=both.bits[:length], dtype=both.dtype),
        Elements(bits=both.bits[length:], dtype=both.dtype),
    )
    if difference is None:
        reason = "equal as far as both go" if both_lengths else _EQUAL_VALUES
        return without_element(line, probe, f"{both_lengths}{reason}; {detail}", name=name)
    return _divergence(line, probe, name, difference, f"{kind}{both_lengths}{detail}")


_EQUAL_VALUES = "the kept values are equal although their digests differ: other bits were digested"


def _element_difference(
    line: LedgerLine, probe: str, name: str, a: Elements, b: Elements, detail: str
) -> Divergence:
    if a.bits.shape != b.bits.shape or a.dtype != b.dtype:
        return without_element(
            line,
            probe,
            f"{a.dtype} of shape {a.bits.shape} | {b.dtype} of shape {b.bits.shape}; {detail}",
            name=name,
        )
    difference = diff_elements(a, b)
    if difference is None:
        return without_element(line, probe, f"{_EQUAL_VALUES}; {detail}", name=name)
    return _divergence(line, probe, name, difference, detail)


def _divergence(
    line: LedgerLine, probe: str, name: str, difference: ElementDifference, detail: str
) -> Divergence:
    if difference.ulp is None and any(
        isinstance(value, float) and math.isnan(value)
        for value in (difference.value_a, difference.value_b)
    ):
        detail = f"a NaN has no distance; {detail}"
    return Divergence(
        step=line.step,
        update=line.update,
        probe=probe,
        name=name,
        detail=detail,
        **asdict(difference),
    )


def without_element(
    line: LedgerLine, probe: str | None, detail: str, *, name: str | None = None
) -> Divergence:
    """Return a difference that is known to its update, probe or name alone."""
    return Divergence(
        step=line.step,
        update=line.update,
        probe=probe or "ledger",
        name=name,
        element=None,
        value_a=None,
        value_b=None,
        hex_a=None,
        hex_b=None,
        ulp=None,
        num_differing=None,
        num_elements=None,
        max_ulp=None,
        detail=detail,
    )


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which `layers.2` comes before `layers.10`."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )
