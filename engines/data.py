"""Data sets as JSON lines or parquet: reading, the generated arithmetic set, the order of prompts.

The prompts of step k are a pure function of (number of prompts, spec, k): each epoch has its own
order, made from the root seed by a Fisher-Yates shuffle whose draws are hashes, so no generator
has a state to save, and a run that is resumed in the middle of an epoch or at its border goes on
with the same prompts. No prompt is twice in a step. With `data.last_batch=drop` an epoch gives
`num_prompts // prompts_per_step` whole steps and what is left over is dropped for that epoch
(another remainder each time when shuffled). With `carry` the left-over prompts and the first of the
next epoch make a step together; prompts that stand in that step already come later in their epoch,
so that every prompt is seen once an epoch. This module imports no torch.

Usage::

    rows, digest = load_rows(data_file(folder, split="train"))
    chosen = selected_rows(len(rows), "-100:")
    indices = prompt_order(len(chosen), spec, step=1)
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from engines.seeds import derive_seed
from model_specs.data_spec import DATA_SUFFIXES
from model_specs.errors import ArtifactError, SpecError
from model_specs.run_spec import RunSpec

ARITHMETIC_ROWS = {"train": 256, "test": 64}
"""Number of rows of each split of `generated:arithmetic`."""


def data_file(source: str | Path, *, split: str) -> Path:
    """Return the data file of `split`: `source` itself, or `<split>.jsonl` or `.parquet` in it.

    Raises:
        ArtifactError: When it does not exist or is of another kind, or the folder holds both kinds.
    """
    path = Path(source)
    if path.is_dir():
        found = [path / f"{split}{suffix}" for suffix in DATA_SUFFIXES]
        found = [file for file in found if file.is_file()]
        if len(found) == 1:
            return found[0]
        files = [item.name for item in path.iterdir() if item.suffix in DATA_SUFFIXES]
        held = ", ".join(sorted(files)) or "no .jsonl or .parquet file"
        wanted = f"both {found[0].name} and {found[1].name}" if found else f"no {split}.jsonl"
        raise ArtifactError(
            f"data folder {path} has {wanted}; it holds {held}; name the file itself by "
            "`--set data.source=PATH`"
        )
    if not path.is_file():
        raise ArtifactError(
            f"data source {path} does not exist; name a folder or a .jsonl or .parquet file by "
            "`--set data.source=PATH`"
        )
    if path.suffix not in DATA_SUFFIXES:
        raise ArtifactError(f"data source {path} is neither .jsonl nor .parquet")
    return path


def load_rows(path: str | Path) -> tuple[tuple[dict[str, Any], ...], str]:
    """Return the rows of a data file in file order, and the SHA-256 (hex) of its bytes.

    Blank lines of a .jsonl file are skipped. The number of a row (from 0) is its place among the
    rows that are kept.

    Raises:
        ArtifactError: The file is missing, not readable as what its name says, a line is not a JSON
            object (naming file and line), or there is no row at all.
    """
    file = Path(path)
    if not file.is_file():
        raise ArtifactError(f"data file {file} does not exist; set data.source")
    content = file.read_bytes()
    rows = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file, content)
    if not rows:
        raise ArtifactError(f"{path} has no rows")
    return tuple(rows), hashlib.sha256(content).hexdigest()


def _json_rows(file: Path, content: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{file} is not UTF-8 text: {error}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ArtifactError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ArtifactError(f"{file}, line {number}: a {type(row).__name__}, not an object")
        rows.append(row)
    return rows


def _parquet_rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        # One thread and no conversion to pandas: plain Python values, in file order.
        rows: list[dict[str, Any]] = parquet.read_table(file, use_threads=False).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ArtifactError(f"{file} is no readable parquet file: {error}") from error
    return rows


def selected_rows(num_rows: int, bounds: str | None) -> range:
    """Return the row numbers of `data.rows` (`a:b` as in Python); None takes all.

    Raises:
        SpecError: When it leaves no row.
    """
    start, _, stop = (bounds or ":").partition(":")
    chosen = range(num_rows)[int(start) if start else None : int(stop) if stop else None]
    if not chosen:
        raise SpecError(f"data.rows={bounds!r} leaves none of the {num_rows} rows of the file")
    return chosen


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


@lru_cache(maxsize=8)
def _carried_order(
    num_prompts: int, root: int, epoch: int, *, per_step: int, shuffle: bool
) -> tuple[int, ...]:
    """Return the order of an epoch whose first prompts complete the last step of the one before."""
    order: tuple[int, ...] = ()
    for current in range(epoch + 1):
        own = _order(num_prompts, root, current, shuffle=shuffle)
        started = current * num_prompts % per_step
        missing = (per_step - started) % per_step
        waiting = frozenset(order[num_prompts - started :]) if started else frozenset()
        first = [index for index in own if index not in waiting][:missing]
        taken = frozenset(first)
        order = (*first, *(index for index in own if index not in taken))
    return order


def _order(num_prompts: int, root: int, epoch: int, *, shuffle: bool) -> tuple[int, ...]:
    return _epoch_order(num_prompts, root, epoch) if shuffle else tuple(range(num_prompts))


def prompt_order(num_prompts: int, spec: RunSpec, step: int) -> tuple[int, ...]:
    """Return the indices of the prompts that `step` (from 1) draws, all distinct.

    They are `data.prompts_per_step` times `sampling.oversample`.

    Raises:
        SpecError: When there are fewer prompts than one step needs, or `step` is below 1.
    """
    per_step, root, shuffle = spec.prompts_drawn_per_step, spec.seeds.root, spec.data.shuffle
    if num_prompts < per_step:
        raise SpecError(
            f"the data set has {num_prompts} usable prompts but a step draws {per_step} "
            f"(data.prompts_per_step={spec.data.prompts_per_step} times sampling.oversample="
            f"{spec.sampling.oversample}); lower one of them, raise data.max_prompt_tokens, "
            "name more prompts, or widen the filter's band"
        )
    if step < 1:
        raise SpecError(f"step {step} has no prompts: steps are counted from 1")
    if spec.data.last_batch == "drop":
        epoch, place = divmod(step - 1, num_prompts // per_step)
        order = _order(num_prompts, root, epoch, shuffle=shuffle)
        return order[place * per_step : (place + 1) * per_step]
    first = (step - 1) * per_step
    chosen: list[int] = []
    for epoch in range(first // num_prompts, (first + per_step - 1) // num_prompts + 1):
        order = _carried_order(num_prompts, root, epoch, per_step=per_step, shuffle=shuffle)
        begin = max(first - epoch * num_prompts, 0)
        chosen.extend(order[begin : begin + per_step - len(chosen)])
    return tuple(chosen)
