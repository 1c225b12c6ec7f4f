"""One self-contained HTML page about a run or a comparison: the same folder, the same file.

Everything is read from run folders; nothing is fetched, and no clock, host or path outside of them
is read. Neither is what two runs of one name, spec, environment and bits do not share: seconds and
attempts are in lock.json and in Prefect. Light and dark; readable on a phone.

    (run / "report.html").write_text(render(run, details))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from engines.provenance.completion_diff import common_prefix
from engines.provenance.ledger import Ledger, read_ledger
from engines.provenance.lock import LOCK_FILE, LockRow, read_lock
from engines.runs import legs
from model_specs.json_text import read_json
from tasks.charts import CURVES, curve, line_chart
from tasks.compared_amounts import compared_amounts
from tasks.html_divergence import completion_card, divergence_card, equal_chip, strip
from tasks.html_night import night_section
from tasks.html_page import Raw, chip, page, section, size, table, tiles, tone_of
from tasks.samples_table import newest_samples

SHOWN_SAMPLES = 3
CONTROLS = ("native control", "stock control")
"""Gates that show that another gate can be red; the first must be Misaligned."""
DIFFERENCES = ("identity", "plan", "execution", "environment")
"""What can differ in what went into two legs."""


def render(folder: Path, details: Mapping[str, Any]) -> str:
    """Return the page for the run in `folder` with the outcome `details` (verdict.json)."""
    found = {name: folder / name for name in legs(folder)}
    return render_legs(found, details, sides=[f"{details['run_id']}/{name}" for name in found])


def render_legs(
    found: Mapping[str, Path], details: Mapping[str, Any], *, sides: Sequence[str]
) -> str:
    """Return the page about some legs, of which the first two are compared.

    Args:
        found: Name of each leg -> its folder.
        details: `verdict`, `headline`, `run_id`, `chain_digest`, `comparison` or None, and of a
            comparison of several legs its `pairs`.
        sides: The legs as `lockstep diff` takes them.
    """
    ledgers = {name: read_ledger(path) for name, path in found.items()}
    comparison = details.get("comparison") or {}
    first = comparison.get("first")
    body = "".join(
        (
            _verdict(details),
            _compared(found, comparison),
            _pairs(details),
            night_section(details),
            divergence_card(comparison, sides[:2]),
            completion_card(comparison),
            strip(ledgers),
            _charts(ledgers, mark=first["step"] if first else None),
            _gates(found, details),
            _samples(found),
            _differences(comparison),
            _stages(found),
            _environment(found),
        )
    )
    return page(f"{details['verdict']}: {details['run_id']}", body)


def _verdict(details: Mapping[str, Any]) -> str:
    facts = [("run", details["run_id"]), ("chain digest", details["chain_digest"])]
    rows = "".join(
        f"<dt>{name}</dt><dd><code>{escape(str(value))}</code></dd>"
        for name, value in facts
        if value
    )
    return (
        f'<header class="band {tone_of(details["verdict"])}">'
        f"<h1>{escape(details['verdict'])}</h1>\n<p>{escape(details['headline'])}</p>\n"
        f"<dl>{rows}</dl></header>\n"
    )


def _compared(found: Mapping[str, Path], comparison: Mapping[str, Any]) -> str:
    """What the verdict rests on, in numbers."""
    stages = [row for rows in _locks(found).values() for row in rows]
    reused = ("stages from a cache", f"{sum(row.cached for row in stages)} of {len(stages)}")
    if not comparison or not comparison.get("compared"):
        return section("What was looked at", tiles([reused])) if stages else ""
    compared = comparison["compared"]
    leg, *others = found.values()
    amounts = compared_amounts(
        leg,
        updates=compared["updates"],
        first_probe=(comparison.get("first") or {}).get("probe"),
        beside=others[0] if others else None,
    )
    figures = [
        ("steps in common", str(comparison["common_steps"])),
        ("updates equal", str(compared["updates"])),
        ("digests equal", f"{compared['tensors']:,}"),
        ("tokens under them", f"{amounts.tokens:,}"),
    ]
    if amounts.tensor_bytes is not None:
        figures.append(("tensors under them", size(amounts.tensor_bytes)))
    note = "In each leg, up to the first difference."
    return section("What was compared", tiles([*figures, *([reused] if stages else [])]), note=note)


def _pairs(details: Mapping[str, Any]) -> str:
    """Each leg against the first, where a comparison has several."""
    pairs = details.get("pairs", ())
    if len(pairs) < 2:
        return ""
    rows = [
        (pair["a"], pair["b"], chip(pair["verdict"], tone_of(pair["verdict"])), pair["headline"])
        for pair in pairs
    ]
    return section("Each against the first", table(("a", "b", "found", "what"), rows))


def _charts(ledgers: Mapping[str, Ledger], *, mark: int | None) -> str:
    charts = [
        line_chart(title, {leg: curve(ledger, metric) for leg, ledger in ledgers.items()}, mark)
        for metric, title in CURVES
    ]
    return section("Curves", f'<div class="charts">{"".join(charts)}</div>\n')


def _gates(found: Mapping[str, Path], details: Mapping[str, Any]) -> str:
    """Every gate once, with the legs that found the same; controls under what they belong to."""
    by_result: dict[tuple[bool, str, str, str, bool], list[str]] = {}
    for leg, path in found.items():
        for gate, facts in read_json_or(path / "gates.json", {}).items():
            key = (
                gate in CONTROLS,
                gate,
                facts["verdict"],
                facts["summary"],
                facts.get("holds", True),
            )
            by_result.setdefault(key, []).append(leg)
    rows = [
        (
            gate,
            " ".join(names),
            Raw(chip(verdict, "green" if holds else "red") + (_expected(gate) if control else "")),
            summary,
        )
        for (control, gate, verdict, summary, holds), names in sorted(by_result.items())
    ]
    if not rows:
        return ""
    body = table(("gate", "legs", "found", "figure"), rows)
    return section("Gates and their controls", _beside(details) + body)


def _expected(gate: str) -> str:
    text = "must differ" if gate == "native control" else "must be near"
    return f' <span class="soft">control, {text}</span>'


def _beside(details: Mapping[str, Any]) -> str:
    """The gate's figure and, beside it, what vLLM's own ops give."""
    alignment, native = details.get("alignment"), details.get("native_control")
    if not alignment:
        return ""
    cells = [
        (
            str(alignment["max_abs_diff"]),
            f"largest log-prob difference, {alignment['num_tokens']:,} tokens, "
            f"{alignment['exact_fraction']:.2%} exactly equal",
        )
    ]
    if native:
        cells.append((str(native["max_abs_diff"]), "beside it: vLLM's native ops on these weights"))
    boxes = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in cells)
    return f'<div class="beside">{boxes}</div>\n'


def _samples(found: Mapping[str, Path]) -> str:
    """The first samples of the last step that all legs have, side by side."""
    by_leg = {name: newest_samples(path / "samples.jsonl") for name, path in found.items()}
    steps = [{row["step"] for row in rows} for rows in by_leg.values()]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return ""
    last = max(common)
    chosen = [
        [row for row in rows if row["step"] == last][:SHOWN_SAMPLES] for rows in by_leg.values()
    ]
    cards = "".join(_sample(list(by_leg), rows) for rows in zip(*chosen, strict=False))
    body = f'<div class="samples">{cards}</div>\n'
    return section(f"Completions of step {last}", body, note="The first of the last common step.")


def _sample(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    texts = [row["completion"] for row in rows]
    equal = len(set(texts)) == 1
    shown = equal_chip(equal) if len(rows) > 1 else ""
    sides = []
    for name, row in zip(names, rows, strict=True):
        text = row["completion"]
        marked = escape(text)
        if not equal:
            at = min(common_prefix(text, other) for other in texts if other != text)
            marked = f"{escape(text[:at])}<mark>{escape(text[at : at + 1])}</mark>"
            marked += escape(text[at + 1 :])
        sides.append(
            f'<div class="leg"><b>{escape(name)}</b> reward {row["reward"]:.3f}, '
            f"{escape(row['finish_reason'])}<pre>{marked}</pre></div>"
        )
    return (
        f'<article><p class="soft">{escape(rows[0]["request_id"])} {shown}</p>'
        f"<pre>{escape(rows[0]['prompt'])}</pre>\n{''.join(sides)}</article>\n"
    )


def _differences(comparison: Mapping[str, Any]) -> str:
    """Only what differs in what went in."""
    if not comparison:
        return ""
    rows = [
        (kind, field, left, right)
        for kind in DIFFERENCES
        for field, left, right in comparison.get(f"{kind}_differences", ())
    ]
    if not rows:
        return section("What went in differently", "<p>Nothing.</p>\n")
    note = "Of what decides bits and what does not. Where bits differ, these are the suspects."
    body = table(("kind", "field", "a", "b"), rows)
    return section("What went in differently", body, note=note)


def _locks(found: Mapping[str, Path]) -> dict[str, tuple[LockRow, ...]]:
    return {
        name: read_lock(path) if (path / LOCK_FILE).is_file() else ()
        for name, path in found.items()
    }


def _stages(found: Mapping[str, Path]) -> str:
    """A row a stage, with what each leg put out, and whether it was reused."""
    by_stage: dict[tuple[str, int], dict[str, LockRow]] = {}
    for leg, stages in _locks(found).items():
        counts: dict[str, int] = {}
        for row in stages:
            counts[row.stage] = counts.get(row.stage, 0) + 1
            by_stage.setdefault((row.stage, counts[row.stage]), {})[leg] = row
    rows = []
    for (stage, _), by_leg in by_stage.items():
        outputs = {leg: _outputs(row) for leg, row in by_leg.items()}
        rows.append(
            (
                stage,
                Raw("<br>".join(dict.fromkeys(outputs.values()))),
                _agree(outputs, len(found)),
                _each({leg: "yes" if row.cached else "no" for leg, row in by_leg.items()}),
            )
        )
    if not rows:
        return ""
    return section("Stages", table(("stage", "outputs", "legs", "cached"), rows))


def _outputs(row: LockRow) -> str:
    found = (f"{kind} {digest[:16]}" for kind, digest in sorted(row.outputs.items()))
    return "<br>".join(f"<code>{escape(text)}</code>" for text in found)


def _agree(outputs: Mapping[str, str], num_legs: int) -> Raw:
    if len(outputs) < num_legs or num_legs == 1:
        return Raw(escape(" ".join(outputs)))
    if not any(outputs.values()):
        return Raw(escape(" ".join(outputs)))
    return equal_chip(len(set(outputs.values())) == 1)


def _each(values: Mapping[str, str]) -> str:
    """One value where all legs have it, else one a leg."""
    different = list(dict.fromkeys(values.values()))
    if len(different) == 1:
        return different[0]
    return ", ".join(f"{leg} {value}" for leg, value in values.items())


def _environment(found: Mapping[str, Path]) -> str:
    """What the first leg's trainer really had, and how its rollout engines differ from it."""
    environment = next(
        (
            read_json(path / "environment.json")
            for path in found.values()
            if (path / "environment.json").is_file()
        ),
        None,
    )
    if environment is None:
        return ""
    rows = [(name, _text(value)) for name, value in _facts(environment)]
    note = "Read back inside the engine processes of the first leg."
    return section("Environment", table(("fact", "value"), rows), note=note)


def _facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    trainer = environment.get("trainer", {})
    yield from trainer.get("versions", {}).items()
    for group in ("cpu", "cuda", "torch"):
        values = trainer.get(group)
        if isinstance(values, Mapping):
            yield from ((f"{group} {key}", value) for key, value in values.items())
    for key, value in trainer.get("variables", {}).items():
        if value is not None:
            yield key, value
    for name, engine in environment.get("rollout", {}).items():
        yield f"{name} ops replaced", engine.get("shared_ops", ())
    yield "code digest", trainer.get("code_digest")
    yield "environment fingerprint", environment.get("fingerprint")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def read_json_or(path: Path, other: Any) -> Any:
    """Read a JSON file; `other` where there is none."""
    return read_json(path) if path.is_file() else other
