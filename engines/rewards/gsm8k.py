r"""`gsm8k`: the last final answer of a completion, compared exactly as a rational number.

The final answer is the last `\boxed{...}` or `#### ...`, whichever comes later. Both it and the
label are normalised (currency signs, thousands commas, units, percent signs, trailing periods,
LaTeX fractions) and compared as fractions: 18, 18.0, $18, 18 apples and 36/2 agree.

    1.0             the answer equals the label
    format_credit   a well-formed number that does not
    0.0             no final answer, or one that is no number
"""

from __future__ import annotations

import re
from fractions import Fraction

from model_specs.run_spec import RewardSpec

MAX_ANSWER_CHARACTERS = 200
"""A longer answer is no number; Python refuses to convert more than 4,300 digits."""

_BOX = "\\boxed{"
_HASH = re.compile(r"####[ \t]*([^\n]*)")
_SPACING = re.compile(r"\\[,;:! ]|~")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|boxed)\s*\{([^{}]*)\}")
# The blanks beside a part belong to it: two runs that both take them would try every split of them.
_FRACTION_COMMAND = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
_BRACE = re.compile(r"[{}]")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+(?=\d+\s*/))?"
    rf"(?P<above>{_DECIMAL})(?:\s*/\s*(?P<below>[-+]?{_DECIMAL}))?\s*(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(r"[^\d/+*=^<>]*(?:\^\s*\{?\s*\d\s*\}?)?", re.DOTALL)
"""What may follow a number: no other number and no operator, except a power as in cm^2."""


def score(
    completion_text: str,
    label: str,
    spec: RewardSpec,
    *,
    finish_reason: str,
    metadata: object = None,
) -> float:
    """Return the reward in [0, 1].

    Args:
        completion_text: Decoded completion.
        label: The right answer, as text.
        spec: `format_credit` is what a well-formed wrong answer earns.
        finish_reason: `stop` or `length`. When cut off by `length`, a `####` answer at the very end
            may be half a number and does not count.
        metadata: Not read.
    """
    answer = final_answer(completion_text, truncated=finish_reason == "length")
    if answer is None:
        return 0.0
    value, wanted = number(answer), number(label)
    if value is not None:
        return 1.0 if value == wanted else spec.format_credit
    return 1.0 if wanted is None and _plain(answer) == _plain(label) != "" else 0.0


def final_answer(text: str, *, truncated: bool = False) -> str | None:
    """Return the content of the last complete box or the last `####` line; None without either."""
    box_at, box = _last_box(text)
    hash_at, after = -1, None
    for match in _HASH.finditer(text):
        ends_the_text = match.end() == len(text)
        if match.group(1).strip() and not (truncated and ends_the_text):
            hash_at, after = match.start(), match.group(1).strip()
    if after is not None and hash_at > box_at:
        return _last_box(after)[1] or after
    return box


def _last_box(text: str) -> tuple[int, str | None]:
    r"""Return (place, content) of the last `\boxed{...}` that closes and is not empty."""
    opened: list[int] = []
    found: list[tuple[int, str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            begin = opened.pop()
            if text.endswith(_BOX, 0, begin):
                found.append((begin - len(_BOX), text[begin : brace.start()].strip()))
    return max((box for box in found if box[1]), default=(-1, None))


def number(text: str) -> Fraction | None:
    r"""Return the one number that `text` states, exactly; None when it states none or several.

    `$1,234.50`, `-3 apples`, `50%` (50, not a half), `\frac{3}{4}`, `3/4`, `1 1/2`, `x = 5`, `18.`
    are numbers; `3 or 4`, `2+2`, `five` and `1/0` are not.
    """
    cleaned = _cleaned(text)
    if len(cleaned) > MAX_ANSWER_CHARACTERS:
        return None
    match = _NUMBER.fullmatch(cleaned)
    if match is None or _UNIT.fullmatch(match["unit"]) is None:
        return None
    above, below = Fraction(match["above"]), Fraction(match["below"] or "1")
    if below == 0:
        return None
    value = Fraction(match["whole"] or "0") + above / below
    return -value if match["sign"] == "-" else value


def _fraction(match: re.Match[str]) -> str:
    above, below = (part.strip() or part[-1] for part in match.groups())
    return f" {above}/{below}"


def _cleaned(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("\u00a0", " ")
    text = _SPACING.sub(" ", text)
    text = text.replace("\\left", "").replace("\\right", "")
    previous = None
    while previous != text:  # innermost first
        previous = text
        text = _FRACTION_COMMAND.sub(_fraction, _TEXT_COMMAND.sub(r" \1", text))
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = text.rsplit("=", 1)[-1]
    text = re.sub(r"[$\u20ac\u00a3*`()\[\]]", "", text)
    text = _THOUSANDS.sub(lambda match: match.group(1).replace(",", ""), text)
    text = re.sub(r"^([-+]?)\s+(?=\d|\.\d)", r"\1", text.strip())
    return text.strip()


def _plain(text: str) -> str:
    return " ".join(_cleaned(text).casefold().rstrip(".").split())
