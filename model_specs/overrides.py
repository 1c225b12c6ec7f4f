"""`--set key=value`: a new spec with some dotted fields replaced, validated as a whole.

A value is read as JSON (`1e-3`, `true`, `null`, `["a"]`) and taken as plain text where that fails
or where the field holds text. All overrides are applied before anything is validated, so two fields
that constrain each other can be changed together.

What a value points to is looked up here, so that the spec is complete before anything starts:

- `model.path=FOLDER` or `hf://org/name@revision` makes the model's facts those of its config.json.
  A spec whose weights are known already (a run that is resumed) keeps its facts, and the folder is
  checked against them.
- `reward=my_pkg.mod:score` or `reward=FILE.py:score` is short for `reward.name=`; its sources are
  looked up and digested, also where the spec has that name already. Where no reward is named, one
  with another digest than the spec has is refused.
- `numerics=stock` is short for `numerics.policy=stock` with every gate that such a policy cannot
  hold at what it may be (`UNALIGNED_GATES`); a gate that is set in the same call is left alone.
- `data.source=PATH@[a:b]` replaces the rows that a spec has, too.
- `data.chat_template=FILE` reads the file; a text that holds `{` is the template itself.

Usage::

    apply_overrides(spec, ("optimizer.lr=1e-3", "seeds.root=2", "model.path=/models/smollm2"))
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from model_specs.base import Frozen, groups_in
from model_specs.data_spec import names_rows
from model_specs.errors import SpecError
from model_specs.lookup import looked_up, own_model
from model_specs.run_spec import UNALIGNED_GATES, RunSpec


def apply_overrides(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    """Return `spec` with each `dotted.key=value` applied (short forms first) and looked up.

    Raises:
        SpecError: For text without `=`, an unknown key (with near names), a value of the wrong type
            (with field and value), a combination that the spec refuses, an unsupported model, or
            own code that is not there or has changed.
        ArtifactError: A model's config.json cannot be read.
    """
    known = _known_fields(RunSpec)
    assignments = [_assignment(override, known) for override in overrides]
    # First, since they also set or clear other fields, which may be set in the same call.
    assignments.sort(key=lambda assignment: assignment[0] not in ("reward.name", "numerics"))
    values = spec.model_dump()
    chosen = dict(assignments).get("model.path")
    model = own_model(spec, chosen) if isinstance(chosen, str) else None
    if model is not None:
        values["model"] = model.model_dump()
    if names_rows(dict(assignments).get("data.source")):
        values["data"]["rows"] = None  # those of the source that is replaced
    for key, value in assignments:
        if key == "reward.name":
            values["reward"] = _renamed(values["reward"], value)
        elif key == "numerics" and isinstance(value, str):
            _choose_policy(values, value)
        elif key == "model.path" and model is not None:
            continue
        else:
            _assign(values, key, value)
    return looked_up(_validated(values), is_new_source="data.source" in dict(assignments))


def _assignment(override: str, known: dict[str, Any]) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    key = key.strip()
    if not separator:
        raise SpecError(f"override {override!r} is not of the form key=value")
    if key == "reward" and not text.lstrip().startswith("{"):
        key = "reward.name"
    if key not in known:
        near = difflib.get_close_matches(key, known, n=4, cutoff=0.5)
        listed = f"; near: {', '.join(near)}" if near else f"; top-level: {_top_level()}"
        raise SpecError(f"override {override!r}: the spec has no field {key!r}{listed}")
    return key, _parsed(text, known[key])


def _renamed(reward: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return a reward that was named: its function is looked up again, here and now."""
    if name == reward["name"]:
        return {**reward, "source": None, "digest": None}
    if str(name).rpartition("/")[2] == reward["name"]:  # a file, by where it lies
        return {**reward, "name": name, "source": None, "digest": None}
    kept = ("timeout_s", "format_credit") if name == "gsm8k" else ("timeout_s",)
    return {"name": name, **{field: reward[field] for field in kept}}


def _choose_policy(values: dict[str, Any], policy: str) -> None:
    """Set the policy and, unless it is aligned, the gates that it cannot hold."""
    values["numerics"]["policy"] = policy
    if policy != "aligned":
        gates = values["plan"]["gates"]
        for name, allowed in UNALIGNED_GATES.items():
            if gates[name] not in allowed:
                gates[name] = allowed[0]


def _validated(values: dict[str, Any]) -> RunSpec:
    for name in ("reduction", "schedule"):
        values[name] = _fields_of_kind(name, values[name])
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{_shown(item['loc'], item['input'])}: {item['msg']}" for item in error.errors()
        )
        raise SpecError(f"the spec with these overrides is not valid: {problems}") from error


def _top_level() -> str:
    return ", ".join(RunSpec.model_fields)


def _known_fields(model: type[Frozen], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> annotation of every field, groups included."""
    known: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        known[prefix + name] = field.annotation
        for inner in groups_in(field.annotation):
            known.update(_known_fields(inner, f"{prefix}{name}."))
    return known


def _holds_text(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(argument is str for argument in get_args(annotation))
    return annotation is str


def _parsed(text: str, annotation: Any) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if _holds_text(annotation) and not isinstance(value, str):
        optional = type(None) in get_args(annotation)
        return None if value is None and optional else text
    return value


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        if not isinstance(values.get(group), dict):
            values[group] = {}  # a group in place of a plain value, or of none
        values = values[group]
    values[last] = value


def _fields_of_kind(name: str, value: Any) -> Any:
    """Drop what only the other kinds of this group have, after its `kind` was replaced."""
    if not isinstance(value, dict):
        return value
    kinds = {
        kind: model.model_fields
        for model in groups_in(RunSpec.model_fields[name].annotation)
        for kind in get_args(model.model_fields["kind"].annotation)
    }
    fields = kinds.get(value.get("kind"))
    all_have = set.intersection(*(set(names) for names in kinds.values()))
    only_others = set().union(*kinds.values()) - set(fields or ()) - all_have
    return {field: inner for field, inner in value.items() if field not in only_others}


def _shown(location: tuple[int | str, ...], value: Any) -> str:
    """Return the field with its value; a group's message names the fields of it that matter."""
    field = _location(location)
    return field if isinstance(value, dict) else f"{field}={value!r}"


def _location(location: tuple[int | str, ...]) -> str:
    """Return the dotted field, without the tag that pydantic puts in for a tagged union."""
    parts = [str(part) for part in location]
    tags = {
        "reduction": ("tree", "stock"),
        "schedule": ("constant", "linear", "cosine", "wsd"),
        "model": ("dense", "moe"),
    }
    if parts[0] in tags and parts[1:2] and parts[1] in tags[parts[0]]:
        del parts[1]
    return ".".join(parts)
