"""The parts of a page about a difference: its card, the completion, and the strip of all probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from engines.contracts import PROBES
from engines.provenance.diff import common_lines
from engines.provenance.ledger import Ledger, LedgerLine
from tasks.html_page import Raw, chip, commands, section

STRIP_COLUMNS = 120
"""Longer runs share a column among several updates; one that differs makes it red."""
STEP_LABELS = 8
"""About this many steps are written under the strip."""

Pair = tuple[LedgerLine | None, LedgerLine | None]


def divergence_card(comparison: Mapping[str, Any], sides: Sequence[str]) -> str:
    """Return the first difference: where, both values, how far, and what to do next.

    Args:
        comparison: `Comparison.to_dict`.
        sides: Names of both sides for `lockstep diff`.
    """
    first = comparison.get("first")
    if not first:
        return ""
    where = [
        ("step", first["step"]),
        ("update", first["update"]),
        ("probe", first["probe"]),
        ("name", first["name"]),
        ("element", first["element"] and "[" + ", ".join(map(str, first["element"])) + "]"),
    ]
    path = "".join(
        f"<div><span>{label}</span><b>{escape(str(value))}</b></div>"
        for label, value in where
        if value is not None
    )
    parts = [f'<div class="where">{path}</div>\n']
    if first["element"] is not None:
        parts.append(_values(first))
    parts.append(f'<p class="soft">{escape(first["detail"])}</p>\n')
    parts.append(_histogram(first.get("ulp_histogram") or ()))
    names = " ".join(sides)
    declared = ",".join(field for field, _, _ in comparison.get("identity_differences", ()))
    if declared:
        names += f" --across {declared}"
    next_steps = [f"lockstep diff {names}", f"lockstep diff {names} --reproduce"]
    parts.append(commands(next_steps))
    return section("First difference", f'<div class="card">{"".join(parts)}</div>\n')


def _values(first: Mapping[str, Any]) -> str:
    sides = "".join(
        f'<div class="value {side}"><span>{side}</span>'
        f"<b>{escape(repr(first[f'value_{side}']))}</b><code>{escape(str(first[f'hex_{side}']))}</code></div>"
        for side in "ab"
    )
    apart = f"{first['ulp']} ULP" if first["ulp"] is not None else "no distance"
    facts = f"{first['num_differing']} of {first['num_elements']} elements differ"
    if first["max_ulp"] is not None:
        facts += f", at most {first['max_ulp']} ULP"
    return (
        f'<div class="values">{sides}<div class="value"><span>apart</span><b>{escape(apart)}</b>'
        f"<code>{escape(facts)}</code></div></div>\n"
    )


def _histogram(histogram: Sequence[Sequence[int]]) -> str:
    """Bars of how many elements are how far apart; none for a single element."""
    if sum(count for _, _, count in histogram) < 2:
        return ""
    most = max(count for _, _, count in histogram)
    bars = "".join(
        f"<div><span>{_bucket(low, high)}</span>"
        f'<i style="width:{max(1.0, 70 * count / most):.1f}%"></i><b>{count}</b></div>\n'
        for low, high, count in histogram
    )
    return f'<div class="histogram"><p class="soft">elements by ULP</p>\n{bars}</div>\n'


def _bucket(low: int, high: int) -> str:
    if high > 1024:
        return f"up to 2<sup>{high.bit_length() - 1}</sup>"
    return str(low) if low == high else f"{low} to {high}"


def completion_card(comparison: Mapping[str, Any]) -> str:
    """Return the first completion that differs: both texts and token rows, the place marked."""
    found = comparison.get("completion")
    if not found:
        return ""
    position, common = found["position"], found["common_text"]
    sides = []
    for side in "ab":
        text, tokens = found[f"text_{side}"], found[f"tokens_{side}"]
        shown = " ".join(
            f"<mark>{token}</mark>" if index == position else str(token)
            for index, token in enumerate(tokens)
        )
        marked = (
            f"{escape(text[:common])}<mark>{escape(text[common : common + 1]) or '&nbsp;'}</mark>"
        )
        sides.append(
            f"<div><b>{side}</b>, {len(tokens)} tokens"
            f"<pre>{marked}{escape(text[common + 1 :])}</pre>"
            f'<pre class="tokens">{shown}</pre></div>'
        )
    body = (
        f'<pre>{escape(found["prompt"])}</pre>\n<div class="pair">{"".join(sides)}</div>\n'
        if found["prompt"]
        else f'<div class="pair">{"".join(sides)}</div>\n'
    )
    note = f"Step {found['step']}, {found['request_id']}: the texts part at token {position}."
    return section("First completion that differs", body, note=note)


def strip(ledgers: Mapping[str, Ledger]) -> str:
    """Return steps across, probes down; a cell is green where both legs have one root."""
    if len(ledgers) < 2:
        return ""
    (name_a, a), (name_b, b) = list(ledgers.items())[:2]
    columns = strip_columns(a, b)
    seen = False
    cells: dict[str, list[str]] = {probe: [] for probe in PROBES}
    counts = dict.fromkeys(("equal", "differs", "after", "absent"), 0)
    for column in columns:
        for probe in PROBES:
            state, where, root_a, root_b = _cell(column, probe)
            if state == "differs" and seen:
                state = "after"
            seen = seen or state == "differs"
            counts[state] += 1
            cells[probe].append(
                f'<td><button class="{state}" tabindex="-1" aria-label="{escape(where)}: {state}" '
                f'data-where="{escape(where)}" data-a="{root_a or ""}" data-b="{root_b or ""}">'
                "</button></td>"
            )
    rows = "".join(
        f"<tr><th>{probe}</th>{''.join(buttons)}</tr>\n" for probe, buttons in cells.items()
    )
    legend = " ".join(
        f'<span class="key"><i class="{state}"></i>{text}</span>'
        for state, text in (
            ("equal", "equal"),
            ("differs", "first difference"),
            ("after", "its consequence"),
            ("absent", "not in this update"),
        )
        if counts[state]
    )
    body = (
        f'<p class="legend">{legend}</p>\n'
        f'<div class="wide strip" data-a="{escape(name_a)}" data-b="{escape(name_b)}">'
        f"<table>{rows}{_axis(columns)}</table></div>\n"
        '<div id="picked" class="picked" aria-live="polite">'
        "Click a cell for its step, its probe and both roots; arrow keys move.</div>\n"
    )
    return section(f"{name_a} and {name_b}, update by update", body)


def strip_columns(a: Ledger, b: Ledger) -> list[list[Pair]]:
    """Return the updates of both legs, several in a column where there are many."""
    pairs = list(zip_longest(*common_lines(a, b)))
    per_column = max(1, -(-len(pairs) // STRIP_COLUMNS))
    return [pairs[index : index + per_column] for index in range(0, len(pairs), per_column)]


def cell_state(column: Sequence[Pair], probe: str) -> str:
    """Return `equal`, `differs` or `absent` for a probe over the updates of a column."""
    return _cell(column, probe)[0]


def _axis(columns: Sequence[Sequence[Pair]]) -> str:
    every = max(1, -(-len(columns) // STEP_LABELS))
    labels = []
    for index, column in enumerate(columns):
        line = column[0][0] or column[0][1]
        assert line is not None
        labels.append(f"<td><span>{line.step}</span></td>" if index % every == 0 else "<td></td>")
    return f'<tr class="axis"><th>step</th>{"".join(labels)}</tr>'


def _cell(column: Sequence[Pair], probe: str) -> tuple[str, str, str | None, str | None]:
    """State, place and both roots: of the first update that differs, else of the last."""
    state, where = "absent", ""
    roots: tuple[str | None, str | None] = (None, None)
    for x, y in column:
        line = x or y
        assert line is not None
        root_x = x.roots.get(probe) if x else None
        root_y = y.roots.get(probe) if y else None
        place = f"step {line.step} update {line.update} {probe}"
        where = where or place
        if root_x is None and root_y is None:
            continue
        if x is None or y is None:
            where, roots = place, (root_x, root_y)
        elif root_x != root_y:
            return "differs", place, root_x, root_y
        else:
            state, where, roots = "equal", place, (root_x, root_y)
    return state, where, *roots


def equal_chip(equal: bool) -> Raw:
    """Return a label that says whether two values are equal."""
    return chip("equal", "green") if equal else chip("differs", "red")
