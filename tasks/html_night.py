"""The part of a night's report that says what it claims, what has changed, and what was varied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.html_page import chip, commands, section, table, tone_of


def night_section(details: Mapping[str, Any]) -> str:
    """Return the sections about a night; nothing for any other run.

    Args:
        details: What verdict.json says, with `night` of a nightly.
    """
    night = details.get("night")
    if not night:
        return ""
    lines = [command for row in night["rows"] for command in row["commands"]]
    claims = table(("claim", "found", "what"), [_claim(row) for row in night["rows"]])
    parts = [section("What was compared tonight", claims + (commands(lines) if lines else ""))]
    parts += [
        section(
            f"What has changed: {row['name']}",
            table(("rank", "suspect"), list(enumerate(row["suspects"], start=1))),
            note="Likeliest first; never a reason not to compare.",
        )
        for row in night["rows"]
        if row["suspects"] and row["verdict"] is not None
    ]
    varied = night["variation"]["varied"]
    rows = table(("varied", "value"), [tuple(found) for found in varied])
    nothing = "<p>Nothing was varied.</p>\n"
    parts.append(section("What leg b was run under", rows if varied else nothing))
    return "".join(parts)


def _claim(row: Mapping[str, Any]) -> tuple[object, ...]:
    tone = "plain" if row["verdict"] is None else tone_of(row["verdict"])
    return row["name"], chip(row["label"], tone), row["summary"]
