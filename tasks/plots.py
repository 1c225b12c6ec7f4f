"""PNG plots of a comparison, for MLflow and Prefect; equal ledgers give equal files.

    names = write_plots(run / "plots", {"a": run / "a", "b": run / "b"}, comparison)

Drawn with matplotlib's Agg, without a date or version in the file. It is imported inside the
functions (a second).
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.contracts import PROBES
from engines.provenance.ledger import Ledger, read_ledger
from tasks.charts import CURVES, curve
from tasks.html_divergence import cell_state, strip_columns

logger = logging.getLogger("lockstep")

STATES = ("absent", "equal", "after", "differs")
COLOURS = ("#d5dbe1", "#2da44e", "#f0a8ab", "#c9252d")
_LINES = (("#0b62c4", "-", 2.6), ("#c2500a", (0, (4, 3)), 1.8))
_DPI = 110


def write_plots(
    folder: Path, found: Mapping[str, Path], comparison: Mapping[str, Any]
) -> tuple[str, ...]:
    """Write `curves.png`, of two legs `strip.png`, and where tensors differ `ulp.png`.

    Args:
        folder: Where the files go; made when it is not there.
        found: Name of each leg -> its folder, of which the first two are compared.
        comparison: `Comparison.to_dict`, or empty.

    Returns:
        The names of the files; none, with a warning, where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("no plots were drawn: matplotlib is not installed in this environment")
        return ()
    folder.mkdir(exist_ok=True)
    ledgers = {name: read_ledger(path) for name, path in list(found.items())[:2]}
    first = comparison.get("first") or {}
    figures = {"curves.png": _curves(ledgers, mark=first.get("step"))}
    if len(ledgers) == 2:
        figures["strip.png"] = _strip(*ledgers.values(), title=_title(comparison, ledgers))
    if first.get("ulp_histogram"):
        figures["ulp.png"] = _histogram(first)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=_DPI, metadata={"Software": None})
    return tuple(sorted(figures))


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _title(comparison: Mapping[str, Any], names: Mapping[str, Ledger]) -> str:
    return f"{' and '.join(names)}: {comparison.get('verdict', 'not compared')}"


def _curves(ledgers: Mapping[str, Ledger], *, mark: int | None) -> Any:
    figure = _figure(11, 3)
    for axes, (metric, title) in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
        for (name, ledger), (colour, style, width) in zip(ledgers.items(), _LINES, strict=False):
            points = [(step, y) for step, y in curve(ledger, metric) if math.isfinite(y)]
            steps, values = [p[0] for p in points], [p[1] for p in points]
            axes.plot(steps, values, color=colour, linestyle=style, linewidth=width, label=name)
        if mark is not None:
            axes.axvline(mark, color=COLOURS[3], linestyle=":", linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    return figure


def _strip(a: Ledger, b: Ledger, *, title: str) -> Any:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    columns = strip_columns(a, b)
    rows, seen = [[0] * len(columns) for _ in PROBES], False
    for x, column in enumerate(columns):
        for y, probe in enumerate(PROBES):
            state = cell_state(column, probe)
            if state == "differs" and seen:
                state = "after"
            seen = seen or state == "differs"
            rows[y][x] = STATES.index(state)
    figure = _figure(11, 3.6)
    axes = figure.subplots()
    axes.pcolormesh(
        rows, cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=3.5, edgecolors="white", linewidth=1
    )
    axes.invert_yaxis()
    axes.set_yticks([index + 0.5 for index in range(len(PROBES))], PROBES, fontsize=8)
    axes.set_xticks(*_ticks(columns), fontsize=8)
    axes.set_xlabel("step", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    names = ("not in this update", "equal", "consequence", "first difference")
    keys = [Patch(color=colour, label=name) for colour, name in zip(COLOURS, names, strict=True)]
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _ticks(columns: Sequence[Any]) -> tuple[list[float], list[str]]:
    every = max(1, -(-len(columns) // 12))
    lines = [(index, column[0][0] or column[0][1]) for index, column in enumerate(columns)]
    shown = [(index, line) for index, line in lines if index % every == 0]
    return [index + 0.5 for index, _ in shown], [str(line.step) for _, line in shown]


def _histogram(first: Mapping[str, Any]) -> Any:
    rows = first["ulp_histogram"]
    names = [f"$2^{{{high.bit_length() - 1}}}$" for _, high, _ in rows]
    figure = _figure(7, 3.2)
    axes = figure.subplots()
    axes.bar(range(len(rows)), [count for _, _, count in rows], color=COLOURS[3])
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.set_ylabel("elements", fontsize=9)
    axes.set_xlabel("ULP, up to", fontsize=9)
    axes.set_title(f"{first['probe']} {first['name']}, step {first['step']}", fontsize=10)
    axes.grid(axis="y", alpha=0.25)
    return figure
