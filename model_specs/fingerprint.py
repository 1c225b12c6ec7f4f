"""Canonical bytes and fingerprints of a spec: what two runs must share to be compared bit for bit.

The encoder is injective: each value carries a type tag and a length, floats are written by
`float.hex()`, mapping keys are sorted, and what it cannot encode raises. `Execution` fields never
enter; `plan` enters only the plan fingerprint.

Usage::

    trajectory_fingerprint(spec)                  # compare before comparing ledgers
    spec_differences(spec_a, spec_b)              # (("optimizer.lr", 1e-06, 2e-06),)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Literal

from model_specs.base import Frozen
from model_specs.errors import SpecError
from model_specs.run_spec import RunSpec

Part = Literal["trajectory", "plan", "identity"]
"""`identity` is trajectory and plan together."""

MISSING = "<no such field>"
"""Stands in `spec_differences` for a field that only one of the two specs has."""

_DIGEST_BYTES = 16


def canonical_bytes(value: Any) -> bytes:
    """Return the one encoding of `value`: tag, payload length in 8 bytes, payload.

    Encodes None, bool, int, finite float, str, tuple or list, mapping with str keys, and `Frozen`
    (without its execution fields). -0.0 and 0.0, 1 and 1.0, 1 and True, () and {} all differ.

    Raises:
        SpecError: For any other type, a non-finite float, or a key that is not a str.
    """
    return _encode(value, "value")


def _encode(value: Any, where: str) -> bytes:
    if isinstance(value, Frozen):
        return _encode(_identity_fields(value), where)
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):  # before int: a bool is one
        return _tagged(b"b", b"1" if value else b"0")
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SpecError(f"{where}={value!r}: a spec holds finite numbers only")
        return _tagged(b"f", value.hex().encode())
    if isinstance(value, str):
        return _tagged(b"s", value.encode())
    if isinstance(value, (tuple, list)):
        items = (_encode(item, f"{where}[{index}]") for index, item in enumerate(value))
        return _tagged(b"t", b"".join(items))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SpecError(
                    f"{where}: mapping key {key!r} is a {type(key).__name__}, not a str"
                )
        pairs = (
            _encode(key, where) + _encode(value[key], f"{where}.{key}") for key in sorted(value)
        )
        return _tagged(b"m", b"".join(pairs))
    raise SpecError(f"{where}: a {type(value).__name__} has no canonical encoding ({value!r})")


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload


def _identity_fields(model: Frozen) -> dict[str, Any]:
    execution = model.execution_fields()
    return {
        name: getattr(model, name) for name in type(model).model_fields if name not in execution
    }


def _top_fields(spec: RunSpec, part: Part) -> dict[str, Any]:
    fields = _identity_fields(spec)
    if spec.origin is None:  # so that a run from nothing keeps its fingerprint
        del fields["origin"]
    plan = fields.pop("plan")
    if part == "trajectory":
        return fields
    if part == "plan":
        return {"plan": plan}
    return {**fields, "plan": plan}


def _hash(domain: str, value: Any) -> str:
    encoded = _tagged(b"d", domain.encode()) + canonical_bytes(value)
    return hashlib.blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()


def trajectory_fingerprint(spec: RunSpec) -> str:
    """Return 32 hex characters over all that decides the bits of step k."""
    return _hash("lockstep-trajectory", _top_fields(spec, "trajectory"))


def plan_fingerprint(spec: RunSpec) -> str:
    """Return 32 hex characters over how many steps there are and what is checked between them."""
    return _hash("lockstep-plan", _top_fields(spec, "plan"))


def flattened(spec: RunSpec, *, part: Part = "trajectory") -> dict[str, Any]:
    """Return dotted field name -> value of the identity fields of `part`, sorted by name."""
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, Frozen):
            for name, inner in _identity_fields(value).items():
                visit(f"{prefix}.{name}", inner)
        elif isinstance(value, tuple) and any(isinstance(item, Frozen) for item in value):
            for index, item in enumerate(value):
                visit(f"{prefix}.{index}", item)
        else:
            flat[prefix] = value

    for name, value in _top_fields(spec, part).items():
        visit(name, value)
    return dict(sorted(flat.items()))


def spec_differences(
    a: RunSpec, b: RunSpec, *, part: Part = "trajectory"
) -> tuple[tuple[str, Any, Any], ...]:
    """Return (dotted field, value in a, value in b) for each identity field of `part` that differs.

    Values are compared by their canonical bytes, so 0.0 and -0.0 differ. A field that only one spec
    has (`reduction.world_size`) stands against `MISSING`. Empty exactly when the fingerprints
    agree.
    """
    return differing(flattened(a, part=part), flattened(b, part=part))


def differing(
    flat_a: Mapping[str, Any], flat_b: Mapping[str, Any]
) -> tuple[tuple[str, Any, Any], ...]:
    """Return (name, value in a, value in b) where canonical bytes differ, or only one has it."""
    return tuple(
        (name, flat_a.get(name, MISSING), flat_b.get(name, MISSING))
        for name in sorted(flat_a.keys() | flat_b.keys())
        if (name in flat_a) != (name in flat_b)
        or canonical_bytes(flat_a[name]) != canonical_bytes(flat_b[name])
    )
