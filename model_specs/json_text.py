"""JSON: the one canonical text of a mapping inside a spec, and files that hold an object.

`JsonObject` is the text: a dict would make a frozen spec mutable and give equal mappings several
spellings; the text has sorted keys, no spaces and ASCII, so that equal mappings are equal values
with one fingerprint.

Usage::

    class MySpec(Frozen):
        options: JsonObject = "{}"

    MySpec(options={"b": 1, "a": 2}).options     # '{"a":2,"b":1}'
    parsed(spec.options)                         # {"a": 2, "b": 1}
    read_json(folder / "config.json")            # ArtifactError where there is no such object
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from model_specs.errors import ArtifactError


def canonical_json(value: Any) -> str:
    """Return the canonical text of a JSON value: sorted keys, no spaces, ASCII.

    Raises:
        ValueError: For a value that JSON does not have, NaN and infinities included.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except TypeError as error:
        raise ValueError(f"{value!r} is no JSON value: {error}") from error


def _canonical_object(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"a {type(value).__name__} is no JSON object; write {{}} for none")
    return canonical_json(dict(value))


JsonObject = Annotated[
    str,
    BeforeValidator(_canonical_object),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
"""A JSON object as canonical text; a mapping or any spelling of it is accepted."""


def parsed(text: str) -> dict[str, Any]:
    """Return the mapping that a `JsonObject` stands for."""
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        ArtifactError: When the file is missing, is not JSON, or holds no object.
    """
    file = Path(path)
    if not file.is_file():
        raise ArtifactError(f"{file} does not exist")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def jsonable(value: Any) -> Any:
    """Replace floats that JSON does not have by their names, and tuples by lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value
