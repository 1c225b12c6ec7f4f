"""The group's rewards: one that can be used, and one that cannot be repeated."""

from __future__ import annotations

import random
from typing import Any


def score(
    completion: str, label: str, *, spec: Any, finish_reason: str, metadata: dict[str, Any]
) -> float:
    """Mostly the share of digits; a little more for the right answer and for a short text."""
    if not completion:
        return 0.0
    share = sum(character.isdigit() for character in completion) / len(completion)
    is_short = finish_reason == "stop" and len(completion) <= metadata["longest"]
    return 0.8 * share + 0.1 * (label in completion) + 0.1 * is_short


def coin(completion: str, label: str, **_: Any) -> float:
    """Another value each time it is asked."""
    return random.SystemRandom().random()
