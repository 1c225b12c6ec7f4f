"""`digits`: a dense reward that a random model can climb within a few steps.

  0.6 * share of digits among the characters
+ 0.2 when the completion ended by itself
+ 0.2 when it is exactly the label
"""

from __future__ import annotations

from model_specs.run_spec import RewardSpec

DIGIT_SHARE_CREDIT = 0.6
STOP_CREDIT = 0.2
EXACT_CREDIT = 0.2

_DIGITS = frozenset("0123456789")


def score(
    completion_text: str,
    label: str,
    spec: RewardSpec,
    *,
    finish_reason: str,
    metadata: object = None,
) -> float:
    """Return the reward in [0, 1]; an empty completion has no digits.

    Args:
        completion_text: Decoded completion without special tokens; blanks at its ends are ignored.
        label: The exact answer.
        spec: Not read; this reward has no options.
        finish_reason: `stop` or `length`.
        metadata: Not read.
    """
    text = completion_text.strip()
    share = sum(character in _DIGITS for character in text) / len(text) if text else 0.0
    stopped = STOP_CREDIT if finish_reason == "stop" else 0.0
    exact = EXACT_CREDIT if text == label.strip() else 0.0
    return DIGIT_SHARE_CREDIT * share + stopped + exact
