"""The first completion with another token: both token rows, both texts, and where they part.

    found = first_differing_completion((leg_a, leg_b), pairs)
    found.position, found.text_a[: found.common_text]

What was drawn lies in `samples/` (token ids) and `samples.jsonl` (texts) of a leg. A completion can
be the first difference itself or a consequence of one: other gradients first, then other weights,
then another token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.provenance.ledger import LedgerLine
from engines.provenance.side_files import read_digests, read_values


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDifference:
    """One completion that two legs drew differently."""

    step: int
    request_id: str
    position: int
    """First token that differs, from 0; the length of the shorter one where that is a prefix."""
    tokens_a: tuple[int, ...]
    tokens_b: tuple[int, ...]
    prompt: str
    """As the model was given it; empty where a leg has no table of samples."""
    text_a: str
    text_b: str
    common_text: int
    """Characters that both texts begin with."""


def first_differing_completion(
    folders: tuple[Path, Path], pairs: Sequence[tuple[LedgerLine, LedgerLine]]
) -> CompletionDifference | None:
    """Find the first sample that both legs drew, with other tokens; None where there is none.

    Args:
        folders: Folders of the two legs.
        pairs: Their lines of the same updates, in order.

    Raises:
        ArtifactError: A side file is damaged.
    """
    for a, b in pairs:
        if a.key != b.key:
            return None  # another number of updates a step: other samples from here on
        if "tokens" not in a.roots or a.roots["tokens"] == b.roots.get("tokens"):
            continue
        if not all((folder / "digests").is_dir() for folder in folders):
            return None
        digests_a, digests_b = (
            read_digests(folder, a.step, a.update).get("tokens", {}) for folder in folders
        )
        for name in digests_a:
            if name in digests_b and digests_a[name] != digests_b[name]:
                return _completion(folders, a.step, a.update, name)
    return None


def _completion(
    folders: tuple[Path, Path], step: int, update: int, name: str
) -> CompletionDifference | None:
    rows = [read_values(folder, step, update).get("tokens", {}).get(name) for folder in folders]
    if rows[0] is None or rows[1] is None:
        return None
    a, b = (tuple(row) for row in rows if row is not None)
    prompts, texts = zip(*(_text(folder, name) for folder in folders), strict=True)
    return CompletionDifference(
        step=step,
        request_id=name,
        position=common_prefix(a, b),
        tokens_a=a,
        tokens_b=b,
        prompt=prompts[0],
        text_a=texts[0],
        text_b=texts[1],
        common_text=common_prefix(*texts),
    )


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many items both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _text(folder: Path, request_id: str) -> tuple[str, str]:
    """Prompt and completion of a sample; of several lines of one sample the last counts."""
    path = folder / "samples.jsonl"
    found = ("", "")
    if not path.is_file():
        return found
    key = json.dumps(request_id)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if key in line and line.endswith("\n"):  # a torn last line does not count
                row = json.loads(line)
                if row["request_id"] == request_id:
                    found = (row["prompt"], row["completion"])
    return found
