"""Model folders as files, without torch: which weight files there are, and whether they are whole.

Usage::

    for file in weight_files(model_dir): ...   # raises on a missing shard or a truncated file
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_specs.errors import ArtifactError
from model_specs.json_text import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def weight_files(model_dir: str | Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder, sorted, each of them whole.

    Raises:
        ArtifactError: When there are none, a shard that the index names is missing, a tensor that
            the index names is not in its shard, or a file is truncated.
    """
    folder = Path(model_dir)
    index_file = folder / INDEX
    if not index_file.is_file():
        if not (folder / SINGLE).is_file():
            raise ArtifactError(f"{folder} has neither {SINGLE} nor {INDEX}")
        safetensors_header(folder / SINGLE)
        return (folder / SINGLE,)
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{index_file} has no weight_map")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise ArtifactError(f"{index_file} names files outside of its folder: {', '.join(names)}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ArtifactError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}; "
            "download the model again"
        )
    for name in names:
        held = safetensors_header(folder / name).keys() - {"__metadata__"}
        wanted = {tensor for tensor, file in weight_map.items() if file == name}
        if held != wanted:
            first = sorted(held ^ wanted)[0]
            where = f"only in {name}" if first in held else f"named by {INDEX} but not in {name}"
            raise ArtifactError(
                f"{folder}: {len(held ^ wanted)} tensors of {INDEX} and {name} do not match; "
                f"{first!r} is {where}"
            )
    return tuple(folder / name for name in names)


def safetensors_header(path: str | Path) -> dict[str, Any]:
    """Return the header of a safetensors file whose size is exactly what the header implies.

    Raises:
        ArtifactError: For a truncated or overlong file, with both sizes, or a broken header.
    """
    file = Path(path)
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
            raise ArtifactError(
                f"{file} is truncated or no safetensors file: {size} bytes, header of {length}"
            )
        content = stream.read(length)
    try:
        header = json.loads(content)
        ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{file} has a broken safetensors header: {error!r}") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        kind = "truncated" if size < expected else "too long"
        raise ArtifactError(f"{file} is {kind}: {size} bytes, its header implies {expected}")
    assert isinstance(header, dict)
    return header
