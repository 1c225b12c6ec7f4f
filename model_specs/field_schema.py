"""The settable fields of a spec by dotted name: JSON schema, description, default, identity.

Whoever takes fields from outside Python (a deployment's parameters, the reference page) reads them
here, so that a new field of the spec is known everywhere at once.

Usage::

    fields = spec_fields()
    fields["optimizer.lr"].schema       # {"type": "number", "exclusiveMinimum": 0}
    overrides_schema()                  # one JSON schema object with a property a field
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin

from model_specs.base import Frozen, groups_in
from model_specs.run_spec import RunSpec

Part = Literal["trajectory", "plan", "execution"]

_NOT_SHOWN = ("title", "description", "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettableField:
    """One field of `RunSpec` or of a group in it."""

    name: str
    """Dotted, as `--set` takes it."""
    schema: Mapping[str, Any]
    """JSON schema of its value, without references, title, description and default."""
    description: str
    """Text of its docstring; empty where its name says it all."""
    default: Any
    """JSON value; only meaningful where not `required`."""
    required: bool
    part: Part
    """Whether it decides bits, the length and checks of a run, or only where it happens."""


def spec_fields() -> dict[str, SettableField]:
    """Return dotted name -> field for every field that is no group, in the order of the spec.

    A field that several kinds of a group have (`reduction.kind`) is there once and takes what any
    of the kinds takes.
    """
    fields: dict[str, SettableField] = {}
    for field in _walk(RunSpec, "", "trajectory"):
        known = fields.setdefault(field.name, field)
        if known.schema != field.schema:
            schema = {"anyOf": [*known.schema.get("anyOf", [known.schema]), field.schema]}
            fields[field.name] = replace(known, schema=schema)
    return fields


def overrides_schema() -> dict[str, Any]:
    """Return a JSON schema for a mapping of dotted field names to values; no other key is allowed.

    `reward` and `numerics` are short forms, as with `--set`, and `filter` takes null to switch it
    off.
    """
    properties: dict[str, Any] = {
        name: {**field.schema, **({"description": field.description} if field.description else {})}
        for name, field in spec_fields().items()
    }
    properties["reward"] = properties["reward.name"]
    properties["numerics"] = properties["numerics.policy"]
    properties["filter"] = {"type": "null"}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _walk(model: type[Frozen], prefix: str, part: Part) -> Iterator[SettableField]:
    schema = model.model_json_schema()
    execution = model.execution_fields()
    for name, info in model.model_fields.items():
        groups = list(groups_in(info.annotation))
        inner_part: Part = part
        if name in execution:
            inner_part = "execution"
        elif not prefix and name == "plan":
            inner_part = "plan"
        if groups:
            for group in groups:
                yield from _walk(group, f"{prefix}{name}.", inner_part)
            if not _takes_plain_value(info.annotation):
                continue
        found = schema["properties"][name]
        yield SettableField(
            name=f"{prefix}{name}",
            schema=_inlined(found, schema.get("$defs", {})),
            description=" ".join(str(found.get("description", "")).split()),
            default=found.get("default"),
            required=info.is_required(),
            part=inner_part,
        )


def _takes_plain_value(annotation: Any) -> bool:
    """Whether a field may hold something else than a group or None."""
    members = get_args(annotation)
    if get_origin(annotation) not in (Union, types.UnionType):
        return False
    return any(member is not type(None) and not list(groups_in(member)) for member in members)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by what they refer to, and drop what is for people."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        key: {name: _inlined(inner, definitions) for name, inner in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in schema.items()
        if key not in _NOT_SHOWN
    }
