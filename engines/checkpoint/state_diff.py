"""Compare two checkpoints: all tensors equal, or the first tensor and element that differ.

    found = compare_checkpoints(a / "checkpoints/step-000004", b / "checkpoints/step-000004")
    found.verdict, found.headline, found.first

The tensors decide, read from both folders; a state digest is what a folder says of itself, and one
that contradicts the tensors is an error. A folder without a meta (what a conversion made, the state
of step 0) is compared too. This module loads no torch: the tensors are read in a process of their
own, one at a time, by `python -m engines.checkpoint.state_diff A B`, which prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engines.checkpoint.dcp import META_FILE, CheckpointMeta, read_meta
from engines.provenance.descent import Divergence, natural_order
from engines.provenance.element_diff import Elements, diff_elements
from engines.provenance.verdict import Verdict
from model_specs.errors import CheckpointError
from model_specs.json_text import jsonable

TIME_LIMIT_S = 3600
_PROBES = {"model": "weights", "optimizer": "optimizer", "progress": "progress"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateComparison:
    """The outcome of comparing two checkpoints."""

    verdict: Verdict
    digests: tuple[str | None, str | None]
    """State digests of both; None for a folder without a meta."""
    tensors: int
    """How many were read and compared."""
    first: Divergence | None = None
    note: str = ""

    @property
    def headline(self) -> str:
        """Say the outcome in one line."""
        if self.first is not None:
            text = f"first difference at {self.first}"
        else:
            text = f"{self.tensors} tensors equal"
            if None not in self.digests:
                text += f", state digest {self.digests[0]}"
        return f"{text} ({self.note})" if self.note else text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        found: dict[str, Any] = jsonable(
            dataclasses.asdict(self) | {"verdict": str(self.verdict), "headline": self.headline}
        )
        return found


def compare_checkpoints(folder_a: str | Path, folder_b: str | Path) -> StateComparison:
    """Compare two checkpoints, of whatever runs and trainers.

    Raises:
        CheckpointError: One cannot be read, or the state digests of both are equal and the tensors
            are not, or the other way round.
    """
    folders = (Path(folder_a), Path(folder_b))
    metas = [read_meta(folder) if (folder / META_FILE).is_file() else None for folder in folders]
    digests = (_digest(metas[0]), _digest(metas[1]))
    note = _note(metas)
    told_equal = None if None in digests else digests[0] == digests[1]
    ended = subprocess.run(
        [sys.executable, "-m", "engines.checkpoint.state_diff", *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise CheckpointError(
            f"{folders[0]} and {folders[1]} cannot be compared: {ended.stderr.strip()[-600:]}"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    if found["first"] is None:
        if told_equal is False:
            raise CheckpointError(
                f"the state digests differ ({digests[0]} | {digests[1]}), but all tensors of "
                f"{folders[0]} and {folders[1]} are equal: a meta is not that of its tensors"
            )
        return StateComparison(
            verdict=Verdict.IDENTICAL, digests=digests, tensors=found["tensors"], note=note
        )
    element, buckets = found["first"]["element"], found["first"]["ulp_histogram"]
    tuples = {
        "element": None if element is None else tuple(element),
        "ulp_histogram": tuple(map(tuple, buckets)),
    }
    first = Divergence(
        **{**found["first"], **tuples},
        step=metas[0].step if metas[0] else 0,
        update=-1,  # as in a ledger: the state that a leg begins with
    )
    if told_equal:
        raise CheckpointError(
            f"{folders[0]} and {folders[1]} both say that their state digest is {digests[0]}, but "
            f"they differ at {first}: files of one have changed since it was written. A resume "
            "from it is refused, which tells which"
        )
    return StateComparison(
        verdict=Verdict.DIVERGED, digests=digests, tensors=found["tensors"], first=first, note=note
    )


def _digest(meta: CheckpointMeta | None) -> str | None:
    return None if meta is None else meta.state_digest


def _note(metas: list[CheckpointMeta | None]) -> str:
    notes = []
    for name in ("step", "trajectory"):
        a, b = (getattr(meta, name) if meta else None for meta in metas)
        if a != b and None not in (a, b):
            notes.append(f"{name} {a} | {b}")
    return "; ".join(notes)


def main(folder_a: str, folder_b: str) -> int:
    """Read both states and print what differs first; weights, then moments, then progress."""
    keys_a, keys_b = _keys(folder_a), _keys(folder_b)
    names = sorted(keys_a.keys() | keys_b.keys(), key=lambda key: (_rank(key), natural_order(key)))
    for folder, keys in ((folder_a, keys_a), (folder_b, keys_b)):
        if not keys:
            raise CheckpointError(f"{folder} has no tensors")
    differing = list(_differing(folder_a, folder_b, names))
    first = None
    if differing:
        key, row = differing[0]
        kind, _, name = key.partition(".")
        detail = f"{len(differing)} of {len(names)} tensors differ"
        if row["detail"]:
            detail = f"{row['detail']}; {detail}"
        first = {**row, "probe": _PROBES.get(kind, kind), "name": name, "detail": detail}
    sys.stdout.write(json.dumps({"tensors": len(names), "first": first}) + "\n")
    return 0


def _rank(key: str) -> int:
    kind = key.partition(".")[0]
    return list(_PROBES).index(kind) if kind in _PROBES else len(_PROBES)


def _keys(folder: str) -> dict[str, Any]:
    """Key -> torch's metadata of each tensor; objects of a trainer's own are left out."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: row for key, row in found.items() if isinstance(row, TensorStorageMetadata)}


def _differing(folder_a: str, folder_b: str, names: list[str]) -> Iterator[tuple[str, Any]]:
    nothing: dict[str, Any] = dict.fromkeys(
        ("element", "value_a", "value_b", "hex_a", "hex_b", "ulp", "num_differing", "num_elements")
    ) | {"max_ulp": None, "ulp_histogram": (), "detail": ""}
    keys = (_keys(folder_a), _keys(folder_b))
    for name in names:
        missing = [side for side, rows in zip("ab", keys, strict=True) if name not in rows]
        if missing:
            only = "b" if missing == ["a"] else "a"
            yield name, {**nothing, "detail": f"only {only} has this tensor"}
            continue
        a, b = (
            _read(folder, name, rows[name])
            for folder, rows in zip((folder_a, folder_b), keys, strict=True)
        )
        if a.bits.shape != b.bits.shape or a.dtype != b.dtype:
            text = f"{a.dtype} of shape {a.bits.shape} | {b.dtype} of shape {b.bits.shape}"
            yield name, {**nothing, "detail": text}
            continue
        difference = diff_elements(a, b)
        if difference is not None:
            yield name, nothing | dataclasses.asdict(difference)


def _read(folder: str, name: str, row: Any) -> Elements:
    import torch

    from engines.checkpoint.dcp import read_tensors

    tensor = torch.zeros(row.size, dtype=row.properties.dtype)
    read_tensors(folder, {name: tensor})
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    bits = tensor.reshape(-1).view(unsigned[tensor.element_size()]).numpy().reshape(tensor.shape)
    return Elements(bits=bits, dtype=str(tensor.dtype).removeprefix("torch."))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
