"""Specs as they were recorded: compared as JSON, so that one of an older version can be as well.

Which runs are comparable is decided by the fingerprints that their ledgers recorded, never by
whether today's `RunSpec` still takes yesterday's `spec.json`.

Usage::

    before = read_json(old_run / "spec.json")
    recorded_differences(before, recorded(spec), part="plan")   # (("plan.num_steps", 8, 9),)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from model_specs.base import Frozen, groups_in
from model_specs.fingerprint import differing
from model_specs.run_spec import RunSpec

Part = Literal["trajectory", "plan", "execution"]
"""A field that today's spec does not have belongs to the part that its group is in."""


def recorded(spec: RunSpec) -> dict[str, Any]:
    """Return a spec as `spec.json` holds it."""
    values: dict[str, Any] = json.loads(spec.model_dump_json())
    return values


def recorded_fields(values: Mapping[str, Any], *, part: Part) -> dict[str, Any]:
    """Return dotted field name -> JSON value of the fields of `part`, sorted by name."""
    fields = {name: value for name, value in _leaves("", values) if _part_of(name) == part}
    if fields.get("origin", ...) is None:  # as in the fingerprint: a run from nothing has none
        del fields["origin"]
    return dict(sorted(fields.items()))


def recorded_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], *, part: Part
) -> tuple[tuple[str, Any, Any], ...]:
    """Return (dotted field, value in a, value in b) for each field of `part` that differs.

    A field that only one of the two has stands against `MISSING`.
    """
    return differing(recorded_fields(a, part=part), recorded_fields(b, part=part))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    inner: Any = None
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        inner = enumerate(value)
    if inner is None:
        yield prefix, value
    else:
        for name, item in inner:
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), item)


def _part_of(name: str) -> Part:
    path = [step for step in name.split(".") if not step.isdigit()]
    if any(".".join(path[:length]) in _execution_names() for length in range(1, len(path) + 1)):
        return "execution"
    return "plan" if path[0] == "plan" else "trajectory"


@cache
def _execution_names() -> frozenset[str]:
    """Dotted names of the fields, and groups of fields, that are no identity."""
    return frozenset(_marked(RunSpec, ""))


def _marked(model: type[Frozen], prefix: str) -> Iterator[str]:
    execution = model.execution_fields()
    for name, field in model.model_fields.items():
        if name in execution:
            yield f"{prefix}{name}"
        else:
            for group in groups_in(field.annotation, of_tuples=True):
                yield from _marked(group, f"{prefix}{name}.")
