"""Data sets as JSON lines: reading, the generated arithmetic set, and the order of prompts.

The prompts of step k are a pure function of (number of prompts, spec, k): each epoch has its own
order, made from the root seed by a Fisher-Yates shuffle whose draws are hashes, so no generator
has a state to save. An epoch gives `num_prompts // prompts_per_step` whole steps; what is left over
is dropped for that epoch (another remainder each time when shuffled), so that no prompt is twice in
a step. This module imports no torch.

Usage::

    rows, digest = load_rows(data_file(folder, split="train"))
    indices = prompt_order(len(rows), spec, step=1)
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from engines.seeds import derive_seed
from model_specs.errors import ArtifactError, SpecError
from model_specs.run_spec import RunSpec

ARITHMETIC_ROWS = {"train": 256, "test": 64}
"""Number of rows of each split of `generated:arithmetic`."""


def data_file(source: str | Path, *, split: str) -> Path:
    """Return the .jsonl file of `split`: `source` itself, or `<split>.jsonl` in that folder.

    Raises:
        ArtifactError: When it does not exist, naming what the folder holds.
    """
    path = Path(source)
    if path.is_dir():
        file = path / f"{split}.jsonl"
        if not file.is_file():
            held = ", ".join(sorted(item.name for item in path.glob("*.jsonl"))) or "no .jsonl file"
            raise ArtifactError(f"data folder {path} has no {split}.jsonl; it holds {held}")
        return file
    if not path.is_file():
        raise ArtifactError(
            f"data source {path} does not exist; name a folder or a .jsonl file by "
            "`--set data.source=PATH`"
        )
    return path


def load_rows(path: str | Path) -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the rows of a JSON lines file in file order, and the SHA-256 (hex) of its bytes.

    Blank lines are skipped. The number of a row (from 0) is its place among the rows that are kept.

    Raises:
        ArtifactError: For a line that is not a JSON object, naming file and line, or no row at all.
    """
    content = Path(path).read_bytes()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ArtifactError(f"{path}, line {number}: a {type(row).__name__}, not an object")
        rows.append(row)
    if not rows:
        raise ArtifactError(f"{path} has no rows")
    return tuple(rows), hashlib.sha256(content).hexdigest()


def arithmetic_rows(split: str, *, seed: int = 0) -> tuple[dict[str, Any], ...]:
    """Return generated rows `{"messages": [{"role", "content"}], "label"}`, one sum each.

    Sums and differences of two numbers from 10 to 99. A row depends on (seed, split, row) alone.

    Raises:
        SpecError: For an unknown split, listing the known ones.
    """
    if split not in ARITHMETIC_ROWS:
        known = ", ".join(sorted(ARITHMETIC_ROWS))
        raise SpecError(f"generated:arithmetic has no split {split!r}; it has {known}")
    rows = []
    for row in range(ARITHMETIC_ROWS[split]):
        draw = derive_seed(seed, "arithmetic", split, row)
        first, second, minus = draw % 90 + 10, draw // 90 % 90 + 10, draw // 8100 % 2
        larger, smaller = max(first, second), min(first, second)
        question = f"{larger} - {smaller}" if minus else f"{first} + {second}"
        answer = larger - smaller if minus else first + second
        message = {"role": "user", "content": f"What is {question}?"}
        rows.append({"messages": [message], "label": str(answer)})
    return tuple(rows)


def write_rows(path: str | Path, rows: tuple[dict[str, Any], ...]) -> None:
    """Write rows as JSON lines with one spelling: sorted keys, no spaces, ASCII, line feeds."""
    lines = (json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n" for row in rows)
    Path(path).write_bytes("".join(lines).encode("ascii"))


@lru_cache(maxsize=8)
def _epoch_order(num_prompts: int, root: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_prompts))
    for last in range(num_prompts - 1, 0, -1):
        # 63 random bits: the bias of the remainder is below 2**-40 for a million prompts.
        other = derive_seed(root, "shuffle", epoch, last) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def prompt_order(num_prompts: int, spec: RunSpec, step: int) -> tuple[int, ...]:
    """Return the indices of the prompts of `step` (from 1), `data.prompts_per_step` distinct ones.

    Raises:
        SpecError: When there are fewer prompts than one step needs, or `step` is below 1.
    """
    per_step = spec.data.prompts_per_step
    if num_prompts < per_step:
        raise SpecError(
            f"the data set has {num_prompts} usable prompts but data.prompts_per_step={per_step}; "
            "lower it, raise data.max_prompt_tokens, or name more prompts"
        )
    if step < 1:
        raise SpecError(f"step {step} has no prompts: steps are counted from 1")
    epoch, place = divmod(step - 1, num_prompts // per_step)
    if spec.data.shuffle:
        order = _epoch_order(num_prompts, spec.seeds.root, epoch)
    else:
        order = tuple(range(num_prompts))
    return order[place * per_step : (place + 1) * per_step]
