"""The pages about a run say what its files say, and are the same file for the same files."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from engines.contracts import PROBES
from model_specs.json_text import read_json
from tasks.html_report import render

pytestmark = pytest.mark.slow


class _Tags(HTMLParser):
    """Collects the cells of the strip and every address that a page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "button":
            self.cells.append(found["class"] or "")
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]


def test_the_page_of_a_twin_shows_every_probe_equal_and_fetches_nothing(twin_folder: Path) -> None:
    page = (twin_folder / "report.html").read_text()
    details = read_json(twin_folder / "verdict.json")
    tags = _Tags(page)
    assert tags.addresses == []
    assert len(tags.cells) == 9 * len(PROBES)
    assert set(tags.cells) == {"equal", "absent"}
    assert tags.cells.count("absent") == 10  # line 0 has weights, sent and received alone
    assert details["chain_digest"] in page
    assert "<h1>Identical</h1>" in page
    assert "<b>0.0</b>" in page
    for said in (
        "steps in common",
        "tokens under them",
        "tensors under them",
        "stages from a cache",
    ):
        assert said in page
    for title in ("Curves", "Gates and their controls", "Stages", "Environment"):
        assert f"<h2>{title}</h2>" in page
    assert "<h2>Completions of step 8</h2>" in page
    assert page.count("<article>") == 3
    for name in ("curves.png", "strip.png"):
        assert (twin_folder / "plots" / name).stat().st_size > 5000


def test_the_same_files_give_the_same_page(twin_folder: Path) -> None:
    details = read_json(twin_folder / "verdict.json")
    assert render(twin_folder, details) == (twin_folder / "report.html").read_text()


def test_a_difference_is_red_where_it_begins_and_pale_after(twin_folder: Path) -> None:
    # The page of a leg against itself with one root of one line changed.
    from dataclasses import replace

    from engines.provenance.ledger import read_ledger
    from tasks.html_divergence import strip

    ledger = read_ledger(twin_folder / "a")
    line = ledger.lines[3]
    changed = replace(line, roots={**line.roots, "grads": "0" * 32, "weights": "0" * 32})
    other = replace(ledger, lines=(*ledger.lines[:3], changed, *ledger.lines[4:]))
    cells = _Tags(strip({"a": ledger, "b": other})).cells
    by_probe = dict(zip(PROBES, zip(*[iter(cells)] * 9, strict=True), strict=True))
    assert by_probe["grads"][3] == "differs"
    assert by_probe["weights"][3] == "after"
    assert cells.count("differs") == 1
    assert cells.count("after") == 1
