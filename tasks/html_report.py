"""One self-contained HTML page about a run: the same bits in, the same file out.

Everything is read from the run folder; nothing is fetched, and no clock, host or path outside of it
is read. Light and dark; readable on a phone.

    (run / "report.html").write_text(render(run, details))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from engines.contracts import PROBES
from engines.provenance.ledger import Ledger, LedgerLine, read_ledger
from engines.provenance.lock import read_lock
from engines.provenance.verdict import Verdict
from engines.runs import legs, read_json
from tasks.charts import line_chart
from tasks.samples_table import read_json_lines

CHARTS = (
    ("reward/mean", "mean reward"),
    ("train/grad_norm", "gradient norm"),
    ("gate/logprob_abs_diff/max", "largest log-prob difference"),
)
SHOWN_SAMPLES = 3
SHORT_CELL = 18
"""A table cell of at most this many characters is not broken."""
STRIP_COLUMNS = 120
"""Longer runs share a column among several updates; one that differs makes it red."""


def render(folder: Path, details: Mapping[str, Any]) -> str:
    """Return the page for the run in `folder` with the outcome `details` (verdict.json)."""
    names = legs(folder)
    ledgers = {name: read_ledger(folder / name) for name in names}
    style = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
    script = (Path(__file__).with_name("report.js")).read_text(encoding="utf-8")
    parts = [
        _verdict(details),
        _divergence(details),
        _night(details),
        _strip(ledgers),
        _charts(ledgers),
        _gates(details),
        _samples(folder, names),
        _differences(details),
        _stages(folder, names),
        _environment(folder, names),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(details['verdict'])}: {escape(details['run_id'])}</title>\n"
        f"<style>\n{style}</style></head>\n<body>\n{''.join(parts)}"
        f"<script>\n{script}</script>\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> str:
    """Return a table; the last `numbers` columns are set as figures."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for row in rows:
        kinds = ["short" if len(str(cell)) <= SHORT_CELL else "long" for cell in row]
        kinds[len(row) - numbers :] = ["number"] * numbers
        cells = [
            f'<td class="{kind}">{escape(str(cell))}</td>'
            for kind, cell in zip(kinds, row, strict=True)
        ]
        body.append(f"<tr>{''.join(cells)}</tr>\n")
    return f'<div class="wide"><table><tr>{top}</tr>\n{"".join(body)}</table></div>\n'


def _verdict(details: Mapping[str, Any]) -> str:
    green = Verdict(details["verdict"]).is_green
    lines = [f"run <code>{escape(details['run_id'])}</code>"]
    if details["chain_digest"]:
        lines.append(f"chain <code>{escape(details['chain_digest'])}</code>")
    alignment, native = details.get("alignment"), details.get("native_control")
    if alignment:
        lines.append(
            f"alignment: max <b>{alignment['max_abs_diff']}</b> over {alignment['num_tokens']} "
            f"tokens, {alignment['exact_fraction']:.2%} exactly equal"
        )
    if native:
        lines.append(
            f"beside it, vLLM's native ops: {escape(native['verdict'])}, max "
            f"{escape(str(native['max_abs_diff']))}"
        )
    cached = {name: leg["cached_stages"] for name, leg in details["legs"].items()}
    lines.append("cached stages: " + ", ".join(f"{leg} {n}" for leg, n in cached.items()))
    body = "<br>\n".join(lines)
    return (
        f'<div class="band {"green" if green else "red"}"><h1>{escape(details["verdict"])}</h1>\n'
        f"<p>{escape(details['headline'])}</p>\n<p class=soft>{body}</p></div>\n"
    )


def _divergence(details: Mapping[str, Any]) -> str:
    first = (details.get("comparison") or {}).get("first")
    if not first:
        return ""
    rows = [(key, value) for key, value in first.items() if value is not None]
    run = details["run_id"]
    commands = f"lockstep diff {run}/a {run}/b\nlockstep show {run}"
    return (
        f'<h2>First divergence</h2>\n<div class="card">{table(("", ""), rows)}'
        f"<pre>{escape(commands)}</pre></div>\n"
    )


def _night(details: Mapping[str, Any]) -> str:
    """What a night has compared, its suspects, and what leg b was run under."""
    night = details.get("night")
    if not night:
        return ""
    rows = [(row["name"], row["label"], row["summary"]) for row in night["rows"]]
    parts = [f"<h2>What was compared tonight</h2>\n{table(('claim', 'found', 'what'), rows)}"]
    commands = [command for row in night["rows"] for command in row["commands"]]
    if commands:
        parts.append(f"<pre>{escape(chr(10).join(commands))}</pre>\n")
    for row in night["rows"]:
        if row["suspects"] and row["verdict"] is not None:
            ranked = list(enumerate(row["suspects"], start=1))
            parts.append(
                f"<h2>What has changed: {escape(row['name'])}</h2>\n"
                f"{table(('rank', 'suspect'), ranked)}"
            )
    varied = [tuple(found) for found in night["variation"]["varied"]]
    parts.append(
        f"<h2>What leg b was run under</h2>\n{table(('varied', 'value'), varied)}"
        if varied
        else "<h2>What leg b was run under</h2>\n<p>Nothing was varied.</p>\n"
    )
    return "".join(parts)


def _strip(ledgers: Mapping[str, Ledger]) -> str:
    """Steps across, probes down; a cell is green where both legs have one root."""
    if len(ledgers) < 2:
        return ""
    (name_a, a), (name_b, b) = list(ledgers.items())[:2]
    pairs = list(zip_longest(a.lines, b.lines))
    size = -(-len(pairs) // STRIP_COLUMNS)
    columns = [pairs[index : index + size] for index in range(0, len(pairs), size)]
    seen = False
    cells: dict[str, list[str]] = {probe: [] for probe in PROBES}
    for column in columns:
        for probe in PROBES:
            state, text = _cell(column, probe)
            if state == "differs" and seen:
                state = "after"
            seen = seen or state == "differs"
            cells[probe].append(
                f'<td><button class="{state}" title="{escape(text)}" data-text="{escape(text)}">'
                "</button></td>"
            )
    rows = "".join(
        f"<tr><th>{probe}</th>{''.join(buttons)}</tr>\n" for probe, buttons in cells.items()
    )
    return (
        f"<h2>Legs {escape(name_a)} and {escape(name_b)}, update by update</h2>\n"
        f'<div class="wide strip"><table>{rows}</table></div>\n'
        '<p id="picked" class="mono soft">Click a cell: step, probe, both roots.</p>\n'
    )


def _cell(
    column: Sequence[tuple[LedgerLine | None, LedgerLine | None]], probe: str
) -> tuple[str, str]:
    state, text = "absent", ""
    for x, y in column:
        line = x or y
        assert line is not None
        root_x = x.roots.get(probe) if x else None
        root_y = y.roots.get(probe) if y else None
        if root_x is None and root_y is None:
            continue
        where = f"step {line.step} update {line.update} {probe}: {root_x} | {root_y}"
        if x is None or y is None:
            text = text or where
        elif root_x != root_y:
            return "differs", where
        else:
            state, text = "equal", where
    return state, text or f"{probe}: not in this update"


def _charts(ledgers: Mapping[str, Ledger]) -> str:
    charts = []
    for metric, title in CHARTS:
        series = {
            leg: [
                (line.step, line.metrics[metric]) for line in ledger.lines if metric in line.metrics
            ]
            for leg, ledger in ledgers.items()
        }
        charts.append(line_chart(title, series))
    return f'<h2>Curves</h2>\n<div class="charts">{"".join(charts)}</div>\n'


def _gates(details: Mapping[str, Any]) -> str:
    rows = [
        (leg, gate, facts["verdict"], facts["summary"])
        for leg, found in details["legs"].items()
        for gate, facts in found["gates"].items()
    ]
    return f"<h2>Gates and their controls</h2>\n{table(('leg', 'gate', 'found', 'figure'), rows)}"


def _samples(folder: Path, names: Sequence[str]) -> str:
    """The first samples of the last step that all legs have, side by side."""
    by_leg = {name: read_json_lines(folder / name / "samples.jsonl") for name in names}
    steps = [{row["step"] for row in rows} for rows in by_leg.values()]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return ""
    last = max(common)
    chosen = {
        name: [row for row in rows if row["step"] == last][:SHOWN_SAMPLES]
        for name, rows in by_leg.items()
    }
    cards = []
    for rows in zip(*chosen.values(), strict=False):
        sides = "".join(
            f"<div><b>leg {escape(name)}</b> reward {row['reward']:.3f}, "
            f"{escape(row['finish_reason'])}<pre>{escape(row['completion'])}</pre></div>"
            for name, row in zip(chosen, rows, strict=True)
        )
        cards.append(
            f"<p class=soft>{escape(rows[0]['request_id'])}</p>"
            f'<pre>{escape(rows[0]["prompt"])}</pre>\n<div class="pair">{sides}</div>\n'
        )
    return f"<h2>Completions of step {last}</h2>\n{''.join(cards)}"


def _differences(details: Mapping[str, Any]) -> str:
    comparison = details.get("comparison") or {}
    found = [
        (kind, field, left, right)
        for kind in ("identity", "environment")
        for field, left, right in comparison.get(f"{kind}_differences", ())
    ]
    if not comparison:
        return ""
    if not found:
        return "<h2>What differed in what went in</h2>\n<p>Nothing.</p>\n"
    head = ("kind", "field", "a", "b")
    return f"<h2>What differed in what went in</h2>\n{table(head, found)}"


def _stages(folder: Path, names: Sequence[str]) -> str:
    rows = [
        (
            leg,
            row.stage,
            row.attempt,
            "yes" if row.cached else "no",
            ", ".join(f"{kind} {digest[:12]}" for kind, digest in sorted(row.outputs.items())),
            f"{row.ambient['seconds']:.1f}",
        )
        for leg in names
        for row in read_lock(folder / leg)
    ]
    head = ("leg", "stage", "attempt", "cached", "outputs", "seconds")
    return f"<h2>Stages</h2>\n{table(head, rows, numbers=1)}"


def _environment(folder: Path, names: Sequence[str]) -> str:
    found = [
        read_json(folder / name / "environment.json")
        for name in names
        if (folder / name / "environment.json").is_file()
    ]
    if not found:
        return ""
    facts = found[0].get("trainer", {})
    rows = [
        *facts.get("versions", {}).items(),
        *((f"cpu {key}", value) for key, value in facts.get("cpu", {}).items()),
        *((f"torch {key}", value) for key, value in facts.get("torch", {}).items()),
        ("code digest", facts.get("code_digest")),
        ("environment fingerprint", found[0].get("fingerprint")),
    ]
    return f"<h2>Environment of the trainer</h2>\n{table(('fact', 'value'), rows)}"
