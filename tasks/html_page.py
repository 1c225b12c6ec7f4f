"""The parts that the HTML pages are put together from; all text is escaped here.

    page("Identical: r1", section("Stages", table(("leg", "stage"), rows)))

Nothing is fetched: style and script lie in the page. Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from engines.provenance.verdict import Verdict

SHORT_CELL = 36
"""A table cell of at most this many characters is not broken."""
_UNDECIDED = (Verdict.VACUOUS, Verdict.INCOMPARABLE, Verdict.UNSUPPORTED)


def page(title: str, body: str) -> str:
    """Return a whole page."""
    folder = Path(__file__).parent
    style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n"
        f"<body>\n{body}<script>\n{script}</script>\n</body></html>\n"
    )


def section(title: str, body: str, *, note: str = "") -> str:
    """Return a section with its heading; nothing for an empty body."""
    if not body:
        return ""
    soft = f'<p class="soft">{escape(note)}</p>\n' if note else ""
    return f"<section><h2>{escape(title)}</h2>\n{soft}{body}</section>\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table.

    On a narrow screen each row becomes a block with its column names. A cell that is `Raw` is
    taken as HTML.
    """
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for row in rows:
        kinds = [
            "short" if isinstance(cell, Raw) or len(str(cell)) <= SHORT_CELL else "long"
            for cell in row
        ]
        cells = [
            f'<td class="{kind}" data-label="{escape(name)}">'
            f"{cell if isinstance(cell, Raw) else escape(str(cell))}</td>"
            for name, kind, cell in zip(head, kinds, row, strict=True)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>\n")
    return (
        f'<div class="wide"><table class="rows"><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{''.join(body)}</tbody></table></div>\n"
    )


class Raw(str):
    """Text that is HTML already."""

    __slots__ = ()


def chip(text: str, tone: str) -> Raw:
    """Return a small label; `tone` is green, red, amber or plain."""
    return Raw(f'<span class="chip {tone}">{escape(text)}</span>')


def tone_of(verdict: str) -> str:
    """Return the tone of a verdict: amber where nothing was found either way."""
    found = Verdict(verdict)
    if found.is_green:
        return "green"
    return "amber" if found in _UNDECIDED else "red"


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Return figures with their labels, as tiles."""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in figures
    )
    return f'<div class="tiles">{cells}</div>\n'


def commands(lines: Sequence[str]) -> str:
    """Return shell commands; a click selects one whole."""
    rows = "".join(f"<code>{escape(line)}</code>" for line in lines)
    return f'<pre class="commands">{rows}</pre>\n'


def size(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
