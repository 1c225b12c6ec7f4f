"""Every public report of docs/public-fault-reports.md is held by a test or a fault that exists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.drill.catalogue import FAULTS

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "public-fault-reports.md"
KNOWN = Path(__file__).with_name("public_fault_reports.txt")
"""One report a line; what is struck from the page must be struck here as well."""
KIND = re.compile(r"(impossible|refused|caught|there)\b|(not met|partly)\b.*: .+")
"""What is not met, or met in part, has a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One row of the page."""

    names: str
    met: str
    here: str
    held_by: tuple[str, ...]


def reports(text: str) -> list[Report]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [
        Report(names=row[0], met=row[1], here=row[2], held_by=tuple(row[3].split("<br>")))
        for row in rows
        if row[0] not in ("report", "---")
    ]


def missing(holder: str) -> str | None:
    """Why what should hold a report does not exist; None where it does."""
    if fault := re.fullmatch(r"fault \*\*(.+)\*\*", holder):
        return None if fault[1] in FAULTS else f"no fault {fault[1]!r}"
    node = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", holder)
    if node is None:
        return f"neither a test nor a fault: {holder}"
    path = TESTS / node[1]
    if not path.is_file():
        return f"no file tests/{node[1]}"
    functions = {
        item.name
        for item in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(item, ast.FunctionDef)
    }
    return None if node[2] in functions else f"no test {node[2]} in tests/{node[1]}"


def identifiers(names: str) -> list[str]:
    """`vllm#1, #2` names two reports of vLLM; a name without a number is one of its own."""
    found, repository = [], ""
    for part in names.split(", "):
        before, sign, number = part.partition("#")
        if not sign:
            return [names]
        repository = before or repository
        found.append(f"{repository}#{number}")
    return found


ROWS = reports(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("report", ROWS, ids=lambda report: report.names)
def test_a_public_report_is_held_by_what_exists(report: Report) -> None:
    assert [why for why in map(missing, report.held_by) if why] == []
    assert KIND.match(report.here), report.here


def test_the_page_says_how_many_reports_there_are_and_names_each_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.splitlines()[2].startswith(f"{len(ROWS)} reports")
    assert len({report.names for report in ROWS}) == len(ROWS) > 80


def test_no_known_report_is_missing_from_the_page() -> None:
    found = [name for report in ROWS for name in identifiers(report.names)]
    known = KNOWN.read_text(encoding="utf-8").splitlines()
    assert sorted(set(found)) == known
    assert identifiers("vllm#5543, #40896, sglang#34683") == [
        *("vllm#5543", "vllm#40896", "sglang#34683")
    ]
    assert identifiers("verl, determinism documentation") == ["verl, determinism documentation"]


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        ("fault **gravity**", "no fault 'gravity'"),
        ("`unit/test_gravity.py::test_apples`", "no file"),
        ("`negative/test_faults.py::test_apples`", "no test test_apples"),
        ("somebody looked", "neither a test nor a fault"),
    ],
)
def test_what_does_not_exist_is_found(holder: str, why: str) -> None:
    assert why in (missing(holder) or "")
