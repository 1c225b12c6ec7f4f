"""The last nights on one page: `nights.html` beside the run folders, and a short Prefect artifact.

Read from the run folders alone, so that it needs no server; newest first, one table a recipe.

    publish_nights(Path("runs"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from engines.provenance.fence import write_durably
from engines.provenance.verdict import Verdict
from engines.runs import read_json

MAX_NIGHTS = 30
"""Of each recipe."""
PAGE = "nights.html"

Night = Mapping[str, Any]
"""A verdict.json that has `night`."""


def publish_nights(runs_dir: Path) -> Path:
    """Write the page, and attach the newest nights to the current flow run; return its path."""
    nights = read_nights(runs_dir)
    page = runs_dir / PAGE
    write_durably(page, render_nights(nights).encode())
    if FlowRunContext.get() is not None:
        create_markdown_artifact(
            key="nights", markdown=nights_markdown(nights), description=f"The nights in {page}"
        )
    return page


def read_nights(runs_dir: Path) -> list[Night]:
    """Return the nights of the run folders, newest first, at most `MAX_NIGHTS` of each recipe."""
    found = [read_json(path) for path in sorted(runs_dir.glob("*/verdict.json"))]
    nights = [details for details in found if details.get("night")]
    nights.sort(key=lambda details: (details["night"]["ended_at"], details["run_id"]), reverse=True)
    kept: list[Night] = []
    for details in nights:
        recipe = details["night"]["recipe"]
        if sum(other["night"]["recipe"] == recipe for other in kept) < MAX_NIGHTS:
            kept.append(details)
    return kept


def render_nights(nights: Sequence[Night]) -> str:
    """Return the page: self-contained, light and dark."""
    style = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
    recipes = sorted({details["night"]["recipe"] for details in nights})
    parts = [
        _table(recipe, [details for details in nights if details["night"]["recipe"] == recipe])
        for recipe in recipes
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Nights</title>\n<style>\n{style}</style></head>\n<body>\n"
        f"{_band(nights)}{''.join(parts)}</body></html>\n"
    )


def _band(nights: Sequence[Night]) -> str:
    if not nights:
        return "<h1>No night yet</h1>\n"
    newest = nights[0]
    green = sum(_is_green(details) for details in nights)
    return (
        f'<div class="band {_colour(newest)}"><h1>{escape(newest["verdict"])}</h1>\n'
        f"<p>{escape(newest['headline'])}</p>\n"
        f"<p class=soft>newest of {len(nights)} nights, {green} of them green</p></div>\n"
    )


def _table(recipe: str, nights: Sequence[Night]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("ended (UTC)", "verdict", "steps", "chain", "compared", "first divergence")
    )
    rows = "".join(_night_row(details) for details in nights)
    return (
        f"<h2>{escape(recipe)}</h2>\n"
        f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>\n'
    )


def _night_row(details: Night) -> str:
    night = details["night"]
    compared = "<br>".join(
        f'<span class="{_row_colour(row)}">{escape(row["name"])}: {escape(row["label"])}</span>'
        for row in night["rows"]
    )
    name = escape(details["run_id"])
    parts = [escape(details["first_divergence"] or "")]
    if not _is_green(details):
        parts = [parts[0] or escape(details["headline"])]
    if night["first_suspect"]:
        parts.append(f"<b>first suspect</b> {escape(night['first_suspect'])}")
    cells = (
        ("short", f'{escape(night["ended_at"])}<br><a href="{name}/report.html">{name}</a>'),
        ("short", f'<b class="{_colour(details)}">{escape(details["verdict"])}</b>'),
        ("number", str(night["num_steps"])),
        ("short mono", escape(details["chain_digest"] or "none")[:12]),
        ("short", compared),
        ("long", "<br>".join(part for part in parts if part)),
    )
    row = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells)
    return f"<tr>{row}</tr>\n"


def nights_markdown(nights: Sequence[Night], *, limit: int = MAX_NIGHTS) -> str:
    """Return the nights as a short table."""
    lines = [
        "| ended (UTC) | recipe | verdict | chain | compared | first suspect |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for details in nights[:limit]:
        night = details["night"]
        compared = ", ".join(f"{row['name']}: {row['label']}" for row in night["rows"])
        lines.append(
            f"| {night['ended_at']} | {night['recipe']} | {details['verdict']} "
            f"| {(details['chain_digest'] or 'none')[:12]} | {compared} "
            f"| {night['first_suspect'] or ''} |"
        )
    return "\n".join(lines) + "\n"


def _is_green(details: Night) -> bool:
    return Verdict(details["verdict"]).is_green


def _colour(details: Night) -> str:
    return "green" if _is_green(details) else "red"


def _row_colour(row: Mapping[str, Any]) -> str:
    if row["verdict"] is None:
        return "soft"
    return "green" if Verdict(row["verdict"]).is_green else "red"
