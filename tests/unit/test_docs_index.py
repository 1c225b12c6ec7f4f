"""Every page can be reached from the index of the docs, and the index from the README."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
APART = ("measurements", "ledgers")
"""Folders that the index names as a whole."""


def links(page: Path) -> set[Path]:
    """What a page links to in the tree."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_in_the_index() -> None:
    pages = {page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in APART}
    index = DOCS / "README.md"
    assert len(pages) > 20
    assert pages - {index} - links(index) == set()
    assert {DOCS / name for name in APART} <= links(index)
    assert index in links(DOCS.parent / "README.md")


def test_a_page_that_nobody_links_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[one](one.md#part) and [a site](https://example.org)")
    assert links(tmp_path / "README.md") == {tmp_path / "one.md"}


def test_the_architecture_page_names_every_module() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", page))))
    apart = ("numerics", "families", "recipes", "rewards", "fsdp2", "megatron")
    modules = {
        path.stem
        for layer in ("flows", "tasks", "engines", "model_specs")
        for path in (DOCS.parent / layer).rglob("*.py")
        if path.stem != "__init__" and path.parent.name not in apart and path.parent.name != "cuda"
    }
    assert len(modules) > 120
    assert modules - words == set()
