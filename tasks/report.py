"""The verdict for people: Prefect artifacts, and report.md and report.html in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.context import FlowRunContext

from engines.runs import legs
from model_specs.json_text import read_json
from tasks.compare import Outcome
from tasks.html_report import render_legs
from tasks.plots import write_plots


def publish(
    folder: Path,
    outcome: Outcome,
    *,
    found: Mapping[str, Path] | None = None,
    mlflow_page: str | None = None,
) -> None:
    """Attach `verdict`, `stages` and `mlflow` to the current flow run; write pages and plots.

    Args:
        folder: The run folder.
        outcome: How the run ended.
        found: Name of each leg -> its folder, where a comparison is of legs elsewhere.
        mlflow_page: Address of the run in MLflow; None where its store is a file, and then the
            command that shows it is attached.
    """
    # From the file, so that the same run folder gives the same pages whenever they are made.
    details = read_json(folder / "verdict.json")
    text = markdown(details)
    (folder / "report.md").write_text(text, encoding="utf-8")
    places = {name: folder / name for name in legs(folder)} if found is None else found
    sides = list(places) if found else [f"{details['run_id']}/{name}" for name in places]
    page = render_legs(places, details, sides=sides)
    (folder / "report.html").write_text(page, encoding="utf-8")
    if places:
        write_plots(folder / "plots", places, details.get("comparison") or {})
    if FlowRunContext.get() is None:
        return
    create_markdown_artifact(key="verdict", markdown=text, description=outcome.headline)
    if legs(folder):
        rows = stage_rows(folder)
        create_table_artifact(key="stages", table=rows, description="Stages of all legs")
    command = outcome.details.get("mlflow_command")
    if mlflow_page:
        create_link_artifact(key="mlflow", link=mlflow_page, link_text=folder.name)
    elif command:
        create_markdown_artifact(key="mlflow", markdown=f"```\n{command}\n```\n")


def markdown(details: Mapping[str, Any]) -> str:
    """The verdict, the figures behind it, and where to look."""
    lines = [
        f"# {details['verdict']}",
        "",
        str(details["headline"]),
        "",
        f"- run `{details['run_id']}`",
    ]
    if details["chain_digest"]:
        lines.append(f"- chain digest `{details['chain_digest']}`")
    if details["first_divergence"]:
        lines.append(f"- first divergence: {details['first_divergence']}")
    if night := details.get("night"):
        lines += [f"- {row['name']}: {row['label']}" for row in night["rows"]]
        lines += [f"- first suspect: {night['first_suspect']}"] if night["first_suspect"] else []
    if details.get("mlflow_command"):
        lines.append(f"- MLflow: `{details['mlflow_command']}`")
    pairs = details.get("pairs", ())
    if pairs:
        lines += ["", "| a | b | verdict | what |", "| --- | --- | --- | --- |"]
        lines += [_row(p["a"], p["b"], p["verdict"], p["headline"]) for p in pairs]
        return "\n".join(lines) + "\n"
    lines += ["", "| leg | gate | verdict | figure |", "| --- | --- | --- | --- |"]
    for name, leg in details["legs"].items():
        for gate, facts in leg["gates"].items():
            lines.append(_row(name, gate, facts["verdict"], facts["summary"]))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    """One row of a table; a bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def stage_rows(folder: Path) -> list[dict[str, Any]]:
    """One row a stage of every leg, from the locks."""
    return [
        {
            "leg": leg,
            "stage": row["stage"],
            "attempt": row["attempt"],
            "cached": row["cached"],
            "seconds": row["ambient"]["seconds"],
            "outputs": ", ".join(f"{k} {v[:12]}" for k, v in sorted(row["outputs"].items())),
        }
        for leg in legs(folder)
        for row in read_json(folder / leg / "lock.json")["rows"]
    ]
