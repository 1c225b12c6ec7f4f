"""JSON Lines of a run folder, and the table of samples that MLflow shows.

The table is a function of `samples.jsonl` alone, so equal files make equal tables. It is written
here, not with `MlflowClient.log_table`: that one appends to a table that exists, so a second call
doubles its rows, and it rounds floats to ten digits. The layout is the one it reads (`split`).

    text = samples_table(newest_samples(leg / "samples.jsonl"))
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_specs.errors import ArtifactError

COLUMNS = (
    "step",
    "prompt",
    "completion",
    "label",
    "reward",
    "advantage",
    "length",
    "finish_reason",
    "worst_logprob_diff",
    "prompt_id",
    "request_id",
)
"""Columns of the table, in the order in which they are shown."""

MAX_ROWS = 4096
"""Newest rows that go into the table; the interface becomes unusable far beyond that. The run
folder keeps all of them."""


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file in file order; an absent file has none.

    A last line without a newline that is not yet a whole object is left out: its writer has not
    finished it, or was killed while writing.

    Raises:
        ArtifactError: Another line is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ArtifactError(
                f"{path}, line {number}: not JSON ({error}); the line starts with {line[:60]!r}. "
                "Restore the file, or take the run up again from its newest checkpoint"
            ) from error
        if not isinstance(row, dict):
            raise ArtifactError(
                f"{path}, line {number}: expected a JSON object, found {type(row).__name__}"
            )
        rows.append(row)
    return rows


def newest_samples(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `samples.jsonl`, one a request, in the order of their last writing.

    A leg that was resumed draws the steps after its checkpoint again and appends them.

    Raises:
        ArtifactError: A line is not a sample.
    """
    by_request: dict[Any, dict[str, Any]] = {}
    for row in read_json_lines(path):
        request_id = _cell(row, "request_id")
        by_request.pop(request_id, None)
        by_request[request_id] = row
    return list(by_request.values())


def samples_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest `MAX_ROWS` rows as JSON text `{"columns": [...], "data": [[...], ...]}`.

    Floats are written so that they read back exactly. A NaN or an infinity, which JSON does not
    have, becomes the string `nan`, `inf` or `-inf`.

    Raises:
        ArtifactError: A row lacks one of `COLUMNS`.
    """
    data = [[_cell(row, column) for column in COLUMNS] for row in list(rows)[-MAX_ROWS:]]
    return json.dumps({"columns": list(COLUMNS), "data": data}, allow_nan=False)


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise ArtifactError(
            f"sample {row.get('request_id', '(no request_id)')} has no {column!r}; "
            f"its fields are {', '.join(sorted(row))}"
        )
    value = row[column]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
