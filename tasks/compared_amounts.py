"""How much two legs were compared on: tokens and bytes behind the digests.

amounts = compared_amounts(run / "a", updates=9)
amounts.tokens, amounts.tensor_bytes
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engines.contracts import PROBES
from engines.provenance.diff import common_lines
from engines.provenance.ledger import LedgerLine, read_ledger
from engines.provenance.side_files import digests_path, read_digests
from model_specs.json_text import read_json

_FLOAT32_PROBES = ("grads", "optimizer", "weights")
_WIRE_PROBES = ("sent", "received")
_MOMENTS = ("exp_avg.", "exp_avg_sq.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What lies behind the digests of a ledger's first updates."""

    tokens: int
    """Sampled tokens, each with the log-prob of both engines."""
    tensor_bytes: int | None
    """Of gradients, optimizer state and weights; None where the leg's model or dtype is
    not here."""


def compared_amounts(
    leg: Path, *, updates: int, first_probe: str | None = None, beside: Path | None = None
) -> Amounts:
    """Count over the first `updates` lines of a leg's ledger that were compared.

    Args:
        leg: Folder of the leg.
        updates: Number of lines that are equal, line 0 included.
        first_probe: Where the next line parts; what it has before that counts as well.
        beside: Folder of the leg that it was compared with; None where both begin alike.

    Raises:
        ArtifactError: The ledger or a side file is missing or damaged.
    """
    ledger = read_ledger(leg)
    compared, _ = common_lines(ledger, ledger if beside is None else read_ledger(beside))
    lines = list(compared[: updates + (first_probe in PROBES)])
    if first_probe in PROBES and len(lines) > updates:
        lines[-1] = _before(lines[-1], str(first_probe))
    tokens = sum(int(line.metrics.get("gate/num_tokens", 0)) for line in lines)
    elements = _elements(leg / "model")
    if not elements or not (leg / "digests").is_dir():
        return Amounts(tokens=tokens, tensor_bytes=None)
    path = leg / "spec.json" if (leg / "spec.json").is_file() else leg.parent / "spec.json"
    # As JSON: the leg may be one of an older version.
    dtype = (read_json(path).get("numerics") or {}).get("compute_dtype")
    if dtype is None:
        return Amounts(tokens=tokens, tensor_bytes=None)
    wire = 2 if dtype == "bfloat16" else 4
    # Updates with the same numbers of names have the same names.
    known: dict[tuple[tuple[str, int], ...], int] = {}
    total = 0
    for line in lines:
        key = tuple(sorted(line.counts.items()))
        if key not in known and digests_path(leg, line.step, line.update).is_file():
            known[key] = _line_bytes(leg, line, elements, wire)
        total += known.get(key, 0)
    return Amounts(tokens=tokens, tensor_bytes=total)


def _before(line: LedgerLine, first_probe: str) -> LedgerLine:
    """The line with the probes before one of them."""
    equal = PROBES[: PROBES.index(first_probe)]
    return replace(
        line,
        counts={probe: count for probe, count in line.counts.items() if probe in equal},
        metrics=line.metrics if "tokens" in equal else {},
    )


def _line_bytes(leg: Path, line: LedgerLine, elements: Mapping[str, int], wire: int) -> int:
    digests = read_digests(leg, line.step, line.update)
    return sum(
        (wire if probe in _WIRE_PROBES else 4) * elements.get(_plain(name), 0)
        for probe in (*_FLOAT32_PROBES, *_WIRE_PROBES)
        if probe in line.counts
        for name in digests.get(probe, {})
    )


def _plain(name: str) -> str:
    return next((name.removeprefix(p) for p in _MOMENTS if name.startswith(p)), name)


def _elements(model: Path) -> dict[str, int]:
    """Name -> number of elements of each tensor of a Hugging Face folder, by the files' headers."""
    found: dict[str, int] = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found |= {name: math.prod(row["shape"]) for name, row in header.items()}
    return found
