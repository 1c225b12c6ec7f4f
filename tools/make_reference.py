"""Write docs/reference/*.md from the code, so that they cannot say what it does not do.

python tools/make_reference.py            # write
python tools/make_reference.py --check    # only compare; exit 1 when a page is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import contracts, metrics
from engines.drill.catalogue import FAULTS
from engines.drill.fault import CATCHERS
from engines.provenance import ledger
from engines.provenance.verdict import Verdict
from engines.train.registry import CAPABILITIES
from model_specs import errors
from model_specs.field_schema import SettableField, spec_fields
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.overrides import apply_overrides
from model_specs.registry import FAMILIES, RECIPES, load_recipe

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Written by tools/make_reference.py; change the code, not this page. -->\n"

PARTS = {
    "trajectory": "decides bits: two runs are compared only when it is equal",
    "plan": "how far the run goes and what is checked",
    "execution": "where and how fast; never compared",
}

PROBE_MEANINGS: Mapping[str, str] = {
    "prompts": "token ids of each drawn prompt",
    "tokens": "token ids of each drawn completion",
    "rollout_logprobs": "float32 log-prob of each of these, as the rollout drew it",
    "rewards": "float32 reward of each drawn sample",
    "advantages": "float32 advantage of each sample that is trained on",
    "train_logprobs": "the trainer's score of each token; committed before it is compared",
    "loss": "float32 loss of each sample, and the total",
    "grads": "summed gradient of each tensor",
    "grad_norm": "float64 norm",
    "optimizer": "both moments of each tensor, and the step",
    "weights": "float32 masters",
    "sent": "what the trainer sent, in the wire dtype",
    "received": "what the rollout engine holds, read from its own storage",
}

FAULTS_TEXT = """\
Evidence is worth what it catches. Each fault here is put into a live thing: the real trainer, the
real rollout engine, the driver's loop, a real checkpoint or ledger. It has to be caught by what is
named, at the place that is named; the test suite runs all of them. A course resumes from the
checkpoint of step 2, so its first step is 3.

    lockstep drill                     # ten of them, on a CPU within five minutes
    lockstep drill --all
    lockstep drill --fault "torn file"

The exit code is 0 only when every fault was caught at its place and the same courses without a
fault, before and after, found nothing. What users of other systems met, and what stands against it
here: [public fault reports](public-fault-reports.md).
"""


def run_spec_page() -> str:
    """Every field of the spec."""
    lines = ["# RunSpec", "", NOTE, "Every field, as `--set NAME=VALUE` takes it. `part`:", ""]
    lines += [f"- **{part}**: {meaning}." for part, meaning in PARTS.items()]
    group = None
    for name, field in spec_fields().items():
        head = name.rpartition(".")[0] or "top level"
        if head != group:
            group = head
            lines += ["", f"## {group}", "", "| field | takes | default | part | |"]
            lines += ["| --- | --- | --- | --- | --- |"]
        default = "required" if field.required else f"`{field.default!r}`"
        text = _cell(field.description)
        lines.append(f"| `{name}` | {_takes(field)} | {default} | {field.part} | {text} |")
    lines += ["", "## Recipes", "", "| name | trajectory fingerprint |", "| --- | --- |"]
    lines += [f"| `{n}` | `{trajectory_fingerprint(load_recipe(n))}` |" for n in RECIPES]
    lines += ["", "## Model families", "", ", ".join(f"`{name}`" for name in FAMILIES), ""]
    lines += [
        "## What a trainer can do",
        "",
        "| what | trainers | why not |",
        "| --- | --- | --- |",
    ]
    for row in CAPABILITIES:
        lines.append(f"| {row.name} | {', '.join(row.trainers) or 'none'} | {row.reason} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric, with its names elsewhere."""
    lines = ["# Metrics", "", NOTE]
    lines += [
        "In `metrics.jsonl`, in the ledger and in MLflow. For looking: nothing is compared",
        "",
    ]
    lines[-2] += " through them. Names of other trainers are those of the nearest figure."
    lines += ["| name | is | verl | TRL | slime |", "| --- | --- | --- | --- | --- |"]
    tables = (metrics.METRICS, metrics.PREFIXES, metrics.COMPARISON_METRICS)
    for name, metric in (pair for table in tables for pair in table.items()):
        elsewhere = " | ".join(_code(other) for other in (metric.verl, metric.trl, metric.slime))
        lines.append(f"| `{name}` | {metric.meaning} | {elsewhere} |")
    return "\n".join(lines) + "\n"


def ledger_page() -> str:
    """Probes, lines and files of a ledger."""
    lines = ["# Ledger", "", NOTE, inspect.cleandoc(ledger.__doc__ or ""), "", "## Probes", ""]
    lines += ["In causal order: a first difference explains all later ones.", ""]
    lines += ["| probe | is |", "| --- | --- |"]
    lines += [f"| `{probe}` | {PROBE_MEANINGS[probe]} |" for probe in contracts.PROBES]
    for record in (ledger.LedgerHeader, ledger.LedgerLine, ledger.Commitment):
        lines += ["", f"## {record.__name__}", "", inspect.cleandoc(record.__doc__ or ""), ""]
        lines += ["| field | type | |", "| --- | --- | --- |"]
        texts = _attribute_docstrings(record)
        for field in dataclasses.fields(record):
            kind = _cell(str(field.type))
            lines.append(f"| `{field.name}` | `{kind}` | {_cell(texts.get(field.name, ''))} |")
    lines += ["", f"Schema version {ledger.LEDGER_SCHEMA_VERSION}."]
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    """Verdicts and errors with their exit codes."""
    lines = ["# Exit codes", "", NOTE, "## Verdicts", ""]
    lines += ["The verdict is the flow run's state name, a tag in MLflow and the exit code.", ""]
    lines += ["| verdict | exit code | green |", "| --- | --- | --- |"]
    lines += [
        f"| `{verdict}` | {verdict.exit_code} | {'yes' if verdict.is_green else 'no'} |"
        for verdict in Verdict
    ]
    lines += ["", "## Errors", "", "A command that could not be carried out.", ""]
    lines += ["| error | exit code | |", "| --- | --- | --- |"]
    for name, found in inspect.getmembers(errors, inspect.isclass):
        if issubclass(found, errors.LockstepError):
            first = inspect.cleandoc(found.__doc__ or "").split("\n")[0]
            lines.append(f"| `{name}` | {found.exit_code} | {first} |")
    return "\n".join(lines) + "\n"


def out_of_scope_page() -> str:
    """What no trainer does, and why."""
    lines = ["# Out of scope", "", NOTE]
    lines += ["Each of these is refused by its name before anything starts, with exit code 14:", ""]
    lines += ["```", "$ lockstep run tiny_cpu --set trainer_options.lora=true", "```", ""]
    lines += ["| what | why | instead |", "| --- | --- | --- |"]
    lines += [f"| {r.name} | {r.reason} | {r.remedy} |" for r in CAPABILITIES if not r.trainers]
    lines += [
        "",
        "These do not go with the rest of the spec, and are refused with exit code 2:",
        "",
    ]
    lines += ["| `--set` | refused because |", "| --- | --- |"]
    lines += [f"| `{override}` | {_refusal(override)} |" for override in NOT_TOGETHER]
    return "\n".join(lines) + "\n"


def faults_page() -> str:
    """Every fault of the drill, what catches it and where."""
    lines = ["# Faults", "", NOTE, FAULTS_TEXT, "## What catches", ""]
    lines += ["| by | is |", "| --- | --- |"]
    lines += [f"| {by} | {_cell(text)} |" for by, text in CATCHERS.items()]
    lines += ["", f"## The {len(FAULTS)} faults", ""]
    lines += [
        "**Bold**: one of the ten that `lockstep drill` runs. `S` is a sample of the step.",
        "",
    ]
    lines += [
        "| fault | in | what is done | caught by | where |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS.values():
        name = f"**{fault.name}**" if fault.in_drill else fault.name
        by = "<br>".join(catch.by for catch in fault.caught)
        where = "<br>".join(catch.where.format(sample="S") for catch in fault.caught)
        row = (name, fault.place, fault.does, by, where)
        lines.append(f"| {' | '.join(_cell(cell) for cell in row)} |")
    return "\n".join(lines) + "\n"


NOT_TOGETHER = (
    "sampling.top_p=0.9",
    "loss.tis_clip=2.0",
    "numerics.policy=stock",
)
"""Overrides of the tiny recipe that its aligned numerics or its gates exclude."""


def _refusal(override: str) -> str:
    """What the spec itself says of an override."""
    try:
        apply_overrides(load_recipe("tiny_cpu"), (override,))
    except errors.SpecError as error:
        return str(error)
    raise AssertionError(f"--set {override} is not refused any more; take it off the page")


PAGES = {
    "../faults.md": faults_page,
    "../out-of-scope.md": out_of_scope_page,
    "run-spec.md": run_spec_page,
    "metrics.md": metrics_page,
    "ledger.md": ledger_page,
    "exit-codes.md": exit_codes_page,
}


def outdated() -> list[str]:
    """Names of the pages that are not what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text("utf-8") != page()
    ]


def _takes(field: SettableField) -> str:
    """Say what values a JSON schema takes, in a few words."""
    return _cell(_schema_text(field.schema))


def _schema_text(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_schema_text(inner) for inner in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    bounds = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    limits = [f"{sign} {schema[key]}" for key, sign in bounds.items() if key in schema]
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_schema_text(schema.get('items', {}))}"
    return " ".join([str(kind), ", ".join(limits)]).strip()


def _attribute_docstrings(record: type) -> dict[str, str]:
    """Return field name -> the string that stands under it in the source."""
    source = inspect.getsource(record)
    found = re.findall(r"^    (\w+): [^\n]+\n    \"\"\"(.*?)\"\"\"", source, re.S | re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    name, space, rest = text.partition(" ")
    return f"`{name}`{space}{rest}" if text else ""


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        wrong = outdated()
        print(f"not current: {', '.join(wrong)}" if wrong else "all pages are current")
        sys.exit(1 if wrong else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
