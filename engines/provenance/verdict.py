"""Verdicts: what a comparison or a gate found, how bad it is, and the exit code it ends with."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of a run, a gate or a comparison; each is a Prefect state name and a tag."""

    IDENTICAL = "Identical"
    ALIGNED = "Aligned"
    UNSUPPORTED = "Unsupported"
    INCOMPARABLE = "Incomparable"
    VACUOUS = "Vacuous"
    MISALIGNED = "Misaligned"
    DIVERGED = "Diverged"
    ENGINE_FAILURE = "EngineFailure"

    @property
    def is_green(self) -> bool:
        """Whether this is a passing outcome."""
        return self in (Verdict.IDENTICAL, Verdict.ALIGNED)

    @property
    def exit_code(self) -> int:
        """Exit code of the command line."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Verdict.IDENTICAL: 0,
    Verdict.ALIGNED: 0,
    Verdict.DIVERGED: 10,
    Verdict.MISALIGNED: 11,
    Verdict.INCOMPARABLE: 12,
    Verdict.VACUOUS: 13,
    Verdict.UNSUPPORTED: 14,
    Verdict.ENGINE_FAILURE: 20,
}

_SEVERITY = (
    Verdict.ENGINE_FAILURE,
    Verdict.DIVERGED,
    Verdict.MISALIGNED,
    Verdict.VACUOUS,
    Verdict.INCOMPARABLE,
    Verdict.UNSUPPORTED,
    Verdict.IDENTICAL,
    Verdict.ALIGNED,
)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of the verdicts; of two green ones Identical, which says more.

    An empty collection is Vacuous: nothing was shown.
    """
    present = set(verdicts)
    return next((verdict for verdict in _SEVERITY if verdict in present), Verdict.VACUOUS)
