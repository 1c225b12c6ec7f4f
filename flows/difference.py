"""How a difference is printed: verdict, first difference, completion, what went in differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from engines.provenance.verdict import Verdict

OUT = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
SHOWN_TOKENS = 4
"""Tokens before and after the first that differs."""
_BAR = 30


def print_difference(comparison: Mapping[str, Any]) -> None:
    """Print the outcome of a comparison, as its `to_dict` gives it."""
    verdict = Verdict(comparison["verdict"])
    OUT.print(Text(str(verdict), style="bold green" if verdict.is_green else "bold red"))
    OUT.print(comparison["headline"])
    print_evidence(comparison)


def print_evidence(comparison: Mapping[str, Any]) -> None:
    """Print what stands beside the headline: distances, the completion, what went in differently.

    A field a line, only those that differ.
    """
    first = comparison.get("first") or {}
    for line in histogram_lines(first.get("ulp_histogram", ())):
        OUT.print(line)
    if comparison.get("completion"):
        for line in completion_lines(comparison["completion"]):
            OUT.print(line)
    for kind in ("identity", "plan", "execution", "environment"):
        for field, left, right in comparison.get(f"{kind}_differences", ()):
            OUT.print(f"  {kind} {field}: {left!r} | {right!r}")


def histogram_lines(histogram: Any) -> list[str]:
    """Return a bar a bucket of ULP distances; none for a single bucket with one element."""
    rows = [tuple(row) for row in histogram]
    if sum(count for _, _, count in rows) < 2:
        return []
    most = max(count for _, _, count in rows)
    lines = ["  ULP             elements"]
    for low, high, count in rows:
        name = str(low) if low == high else f"{low}-{high}"
        if high > 1024:
            name = f"up to 2^{high.bit_length() - 1}"
        lines.append(f"  {name:<15} {count:>8} {'#' * max(1, round(_BAR * count / most))}")
    return lines


def completion_lines(completion: Mapping[str, Any]) -> list[str]:
    """Return both sides of a completion, with `>` `<` around the first token that differs."""
    position = completion["position"]
    lines = [
        f"first differing completion: step {completion['step']}, {completion['request_id']}, "
        f"token {position}"
    ]
    for side in "ab":
        text, common = completion[f"text_{side}"], completion["common_text"]
        tokens = completion[f"tokens_{side}"]
        shown = [
            f">{token}<" if index == position else str(token)
            for index, token in enumerate(tokens)
            if abs(index - position) <= SHOWN_TOKENS
        ]
        marked = f"{text[:common]}>{text[common : common + 1]}<{text[common + 1 :]}"
        lines.append(f"  {side}: {marked!r}")
        lines.append(f"     tokens {' '.join(shown)} ({len(tokens)} in all)")
    return lines
