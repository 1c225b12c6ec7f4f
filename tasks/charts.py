"""Line charts as inline SVG, without a clock or a random id: the same values give the same text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from engines.provenance.ledger import Ledger

CURVES = (
    ("reward/mean", "mean reward"),
    ("train/grad_norm", "gradient norm"),
    ("gate/logprob_abs_diff/max", "largest log-prob difference"),
)
"""Metric -> title of the curves that every page shows."""

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 360, 170, 46, 8, 20, 10

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Leg -> (step, value)."""


def curve(ledger: Ledger, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of a metric in a ledger's order."""
    return [(line.step, line.metrics[metric]) for line in ledger.lines if metric in line.metrics]


STYLES = ("a", "b", "c")
"""Classes of report.css, in the order of the legs."""


def line_chart(title: str, series: Series, mark: int | None = None) -> str:
    """Return one chart; the second leg is dashed over the first, so that identity can be seen.

    A value that is not finite is left out of the line and counted in the title.

    Args:
        title: Stands above the chart.
        series: A line a leg.
        mark: Step of the first difference, drawn as a vertical line.
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
        return f'<div class="chart"><p>{label}: no values</p></div>\n'
    low, high = min(values), max(values)
    first, last = min(steps), max(steps)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / ((high - low) or 1.0))

    lines = "".join(
        f'<polyline class="leg-{STYLES[index % len(STYLES)]}" points="'
        f'{" ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)}"/>'
        for index, points in enumerate(finite.values())
    )
    keys = " ".join(
        f'<span class="key-{STYLES[index % len(STYLES)]}">{escape(name)}</span>'
        for index, name in enumerate(finite)
    )
    levels = sorted({low, (low + high) / 2, high})
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" y1="{y(level):.1f}" x2="{WIDTH - RIGHT}" '
        f'y2="{y(level):.1f}"/><text x="{LEFT - 6}" y="{y(level) + 3:.1f}" text-anchor="end">'
        f"{level:.3g}</text>"
        for level in levels
    )
    marked = ""
    if mark is not None and first <= mark <= last:
        marked = (
            f'<line class="mark" x1="{x(mark):.1f}" y1="{TOP}" x2="{x(mark):.1f}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        )
    return (
        f'<div class="chart"><p>{label} <span class="keys">{keys}</span></p>\n'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{grid}'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">step {first}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{last}</text>'
        f"{marked}{lines}</svg></div>\n"
    )
