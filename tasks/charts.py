"""Line charts as inline SVG, without a clock or a random id: the same values give the same text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 360, 150, 52, 18, 10

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Leg -> (step, value)."""


STYLES = ("a", "b", "resume")
"""Classes of report.css, in the order of the legs."""


def line_chart(title: str, series: Series) -> str:
    """Return one chart; the second leg is dashed, so that identity can be seen.

    A value that is not finite is left out of the line and counted in the title.
    """
    finite = {
        name: [(step, value) for step, value in points if math.isfinite(value)]
        for name, points in series.items()
    }
    lost = sum(len(points) for points in series.values()) - sum(map(len, finite.values()))
    label = escape(title) + (f" ({lost} not finite)" if lost else "")
    values = [value for points in finite.values() for _, value in points]
    steps = [step for points in finite.values() for step, _ in points]
    if not values:
        return f'<div class="chart">{label}: no values</div>\n'
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    first, last = min(steps), max(steps)
    width = (last - first) or 1

    def place(step: int, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - 8) * (step - first) / width
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / span)
        return f"{x:.1f},{y:.1f}"

    lines = "".join(
        f'<polyline class="leg-{STYLES[index % len(STYLES)]}" points="'
        f'{" ".join(place(step, value) for step, value in points)}"/>'
        for index, points in enumerate(finite.values())
    )
    keys = " ".join(
        f'<span class="key-{STYLES[index % len(STYLES)]}">{escape(name)}</span>'
        for index, name in enumerate(finite)
    )
    base = HEIGHT - BOTTOM
    return (
        f'<div class="chart">{label} {keys}\n<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">'
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - 8}" y2="{base}"/>'
        f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{base}"/>'
        f'<text x="0" y="{TOP + 8}">{high:.4g}</text><text x="0" y="{base}">{low:.4g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{first}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 4}" text-anchor="end">{last}</text>'
        f"{lines}</svg></div>\n"
    )
