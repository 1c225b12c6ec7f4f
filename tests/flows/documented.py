"""The commands and outputs of the documentation's pages, as a reader would take them from there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "first-twin-run.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ )*"
    r"(?:\S*/)?(?:lockstep|prefect|make|python[\d.]*|pip|mlflow|ray|git|bash)\s"
)


@dataclass(frozen=True, slots=True)
class Fence:
    """A block of a page: what it is written in, its commands, and its other lines."""

    language: str
    commands: tuple[str, ...]
    text: str

    @property
    def is_output(self) -> bool:
        """Whether it shows what a command prints."""
        return not self.language and not self.commands


def fences(text: str) -> Iterator[Fence]:
    """Return the fenced blocks of a page in their order; continued lines are joined."""
    for match in _FENCE.finditer(text):
        body = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
        joined = re.sub(r"\\\n\s*", "", body)
        is_shell = match[2] in ("", "sh", "bash", "shell", "console")
        found = [line for line in joined.splitlines() if is_shell and _COMMAND.match(line)]
        yield Fence(match[2], tuple(_plain(line) for line in found), body)


def _plain(line: str) -> str:
    """A command without its prompt, its comment and the sign that puts it into the background."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    return shlex.join(words[:-1] if words[-1] == "&" else words)


def commands(page: Path) -> tuple[str, ...]:
    """All commands of a page, in their order."""
    found = fences(page.read_text(encoding="utf-8"))
    return tuple(command for fence in found for command in fence.commands)


def unmatched(expected: str, printed: str) -> list[str]:
    """Lines that a page shows and a command did not print; `...` stands for any text."""
    lines = [re.escape(line.strip()).replace(r"\.\.\.", ".*") for line in expected.splitlines()]
    return [line for line in lines if not re.search(rf"^\s*{line}\s*$", printed, re.MULTILINE)]
