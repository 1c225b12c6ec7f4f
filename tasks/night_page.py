"""The last nights on one page: `nights.html` beside the run folders, and a short Prefect artifact.

Read from the run folders alone, so that it needs no server; newest first, one table a recipe.

    publish_nights(Path("runs"))
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from engines.provenance.fence import write_durably
from engines.provenance.verdict import Verdict
from model_specs.errors import ArtifactError
from model_specs.json_text import read_json
from tasks.html_page import Raw, chip, page, section, table, tone_of

logger = logging.getLogger(__name__)

MAX_NIGHTS = 30
"""Of each recipe."""
PAGE = "nights.html"

Night = Mapping[str, Any]
"""A verdict.json that has `night`."""


def publish_nights(runs_dir: Path) -> Path:
    """Write the page, and attach the newest nights to the current flow run; return its path."""
    nights = read_nights(runs_dir)
    place = runs_dir / PAGE
    write_durably(place, render_nights(nights).encode())
    if FlowRunContext.get() is not None:
        create_markdown_artifact(
            key="nights", markdown=nights_markdown(nights), description=f"The nights in {place}"
        )
    return place


def read_nights(runs_dir: Path) -> list[Night]:
    """Return the nights of the run folders, newest first, at most `MAX_NIGHTS` of each recipe."""
    nights = []
    for path in sorted(runs_dir.glob("*/verdict.json")):
        try:
            details = read_json(path)
        except ArtifactError as error:
            logger.warning("left out of the nights: %s", error)
            continue
        nights += [details] if details.get("night") else []
    nights.sort(key=lambda details: (details["night"]["ended_at"], details["run_id"]), reverse=True)
    kept: list[Night] = []
    for details in nights:
        recipe = details["night"]["recipe"]
        if sum(other["night"]["recipe"] == recipe for other in kept) < MAX_NIGHTS:
            kept.append(details)
    return kept


def render_nights(nights: Sequence[Night]) -> str:
    """Return the page: self-contained, light and dark."""
    recipes = sorted({details["night"]["recipe"] for details in nights})
    tables = "".join(
        section(
            recipe,
            table(
                ("ended (UTC)", "verdict", "steps", "chain", "compared", "first divergence"),
                [_row(details) for details in nights if details["night"]["recipe"] == recipe],
            ),
        )
        for recipe in recipes
    )
    return page("Nights", _band(nights) + tables)


def _band(nights: Sequence[Night]) -> str:
    if not nights:
        return "<h1>No night yet</h1>\n"
    newest = nights[0]
    green = sum(Verdict(details["verdict"]).is_green for details in nights)
    return (
        f'<header class="band {tone_of(newest["verdict"])}">'
        f"<h1>{escape(newest['verdict'])}</h1>\n<p>{escape(newest['headline'])}</p>\n"
        f'<p class="soft">newest of {len(nights)} nights, {green} of them green</p></header>\n'
    )


def _row(details: Night) -> tuple[object, ...]:
    night, name = details["night"], escape(details["run_id"])
    found = details["first_divergence"] or ""
    if not found and not Verdict(details["verdict"]).is_green:
        found = details["headline"]
    suspect = night["first_suspect"]
    parts = [escape(found), f"<b>first suspect</b> {escape(suspect)}" if suspect else ""]
    return (
        Raw(f'{escape(night["ended_at"])}<br><a href="{name}/report.html">{name}</a>'),
        chip(details["verdict"], tone_of(details["verdict"])),
        night["num_steps"],
        Raw(f"<code>{escape(details['chain_digest'] or 'none')[:12]}</code>"),
        Raw("<br>".join(_claim(row) for row in night["rows"])),
        Raw(f'<div class="wrap">{"<br>".join(part for part in parts if part)}</div>'),
    )


def _claim(row: Mapping[str, Any]) -> str:
    tone = "plain" if row["verdict"] is None else tone_of(row["verdict"])
    return f"{escape(row['name'])} {chip(row['label'], tone)}"


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
