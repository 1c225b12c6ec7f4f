"""What lies beside a ledger: digests by name, values of samples, kept tensors; names and encodings.

```
digests/step-000003-0.json                 probe -> name -> digest of step 3 update 0
samples/step-000003.json                   probe -> name -> values; of update 1 step-000003-1.json
tensors/step-000003-0/<probe>.safetensors  kept tensors
rollouts/step-000003.json                  a dumped rollout (engines.rollout_dump)
evals/step-000003.json                     samples of the evaluations after step 3
```

Invariant: what is written is read back with the same bits; floats go by `float.hex()`, a NaN with
its payload.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_specs.errors import ArtifactError

Values = Mapping[str, Mapping[str, Sequence[Any]]]
"""Probe -> name -> values."""

_SIDE_NAME = re.compile(r"step-(\d{6,})")


def encode_value(value: Any) -> Any:
    """Return a sample value for JSON: floats by `float.hex()`, a NaN with its 64 bits."""
    if isinstance(value, float):
        if math.isnan(value):
            return f"nan:{struct.pack('>d', value).hex()}"
        return value.hex()
    return value


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` was given."""
    if isinstance(value, str):
        if value.startswith("nan:"):
            return struct.unpack(">d", bytes.fromhex(value[4:]))[0]
        return float.fromhex(value)
    return value


def digests_path(folder: str | Path, step: int, update: int) -> Path:
    """Side file with probe -> name -> digest of an update."""
    return Path(folder) / "digests" / f"step-{step:06d}-{update}.json"


def values_path(folder: str | Path, step: int, update: int) -> Path:
    """Side file with the values of the sample probes of an update."""
    suffix = f"-{update}" if update > 0 else ""
    return Path(folder) / "samples" / f"step-{step:06d}{suffix}.json"


def tensors_path(folder: str | Path, step: int, update: int, probe: str) -> Path:
    """File with the kept tensors of a probe of an update."""
    return Path(folder) / "tensors" / f"step-{step:06d}-{update}" / f"{probe}.safetensors"


def read_digests(folder: str | Path, step: int, update: int) -> dict[str, dict[str, str]]:
    """Read probe -> name -> digest of an update.

    Raises:
        ArtifactError: the side file is missing or damaged.
    """
    path = digests_path(folder, step, update)
    try:
        digests: dict[str, dict[str, str]] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(
            f"step {step} update {update}: the digests of its tensors are missing ({path})"
        ) from None
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    return digests


def read_values(folder: str | Path, step: int, update: int) -> dict[str, dict[str, list[Any]]]:
    """Read probe -> name -> values of an update; empty where none were kept."""
    path = values_path(folder, step, update)
    try:
        encoded = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    return {
        probe: {name: [decode_value(value) for value in row] for name, row in rows.items()}
        for probe, rows in encoded.items()
    }


def side_files_after(folder: Path, step: int) -> list[Path]:
    """Return the side files and tensor folders of all steps after `step`."""
    found = []
    for kind in ("digests", "samples", "tensors", "rollouts", "evals"):
        if (folder / kind).is_dir():
            for path in sorted((folder / kind).iterdir()):
                match = _SIDE_NAME.match(path.name)
                if match and int(match[1]) > step:
                    found.append(path)
    return found


def drop_old_tensors(folder: Path, last_step: int) -> None:
    """Delete the kept tensors of all steps up to `last_step`: what is kept is a ring."""
    if (folder / "tensors").is_dir():
        for path in sorted((folder / "tensors").iterdir()):
            match = _SIDE_NAME.match(path.name)
            if match and int(match[1]) <= last_step:
                shutil.rmtree(path)


def encode_line(row: Mapping[str, Any]) -> bytes:
    """Return one JSON line."""
    return (json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n").encode()
