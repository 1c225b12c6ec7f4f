r"""Answers of mathematics problems as text: boxes, normal forms, LaTeX as one-line formulas.

Two normal forms, both with the verdicts of the graders that RL trainers use:

- `latex_form` is the one of the MATH benchmark: LaTeX spellings of the same thing become one.
- `infix_form` drops units, currency, percent signs and upper case, and writes LaTeX as a formula
  (`\frac{x+1}{2}` is `(x+1)/2`), for comparison as text and by `engines.rewards.expressions`.

Usage::

    last_box(r"so \boxed{\frac12}")     # r"\frac12"
    latex_form(r"\dfrac12")             # r"\frac{1}{2}"
    infix_form(r"$1,234$ miles")        # "1234"
"""

from __future__ import annotations

import re
from fractions import Fraction

BOX = "\\boxed"

UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day"),
    *("week", "month", "year", "foot", "feet", "inch", "yard"),
)
"""Words that are dropped from an answer, with a plural ending and a power behind them."""

_MAGNITUDES = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_INTEGER_TOLERANCE = Fraction(1, 10**7)
_WHOLE_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,2})?", re.IGNORECASE)
_MAX_NUMBER_CHARACTERS = 1000
_SIMPLE = re.compile(r"[A-Za-z0-9.]+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)

_FRACTIONS = frozenset({"frac", "dfrac", "tfrac", "cfrac"})
_TEXTS = frozenset(
    {"text", "textbf", "textit", "mathrm", "mathbf", "mathit", "mbox", "operatorname"}
)
_SYMBOLS = {
    **dict.fromkeys(("left", "right", "!", "displaystyle", "limits"), ""),
    **dict.fromkeys((",", ";", ":", " ", "quad", "qquad", "\n"), " "),
    **dict.fromkeys(("cdot", "times", "ast"), "*"),
    **dict.fromkeys(("%", "$", "circ"), ""),
    "div": "/",
    "pi": "pi",
    "ln": "ln",
    "infty": "inf",
    "cup": "U",
    "{": "{",
    "}": "}",
}


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None without one, or one that is cut off."""
    start = text.rfind(BOX)
    if start < 0 or not text.startswith("{", start + len(BOX)):
        return None
    end = _closing(text, start + len(BOX))
    return None if end is None else text[start + len(BOX) + 1 : end]


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def latex_form(answer: str) -> str:
    """Return the answer in one spelling of LaTeX, without spaces, units and currency."""
    text = answer.strip()
    whole = _WHOLE_TEXT.search(text)
    if whole is not None:
        text = whole.group(1).strip()
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text)
    for dropped in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(dropped, "")
    if text.count("\\text{ ") == 1:  # only ever a unit
        text = text.partition("\\text{ ")[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$", r"\\frac{\1}{\2}", text)


def _braced_fractions(text: str) -> str:
    r"""Give single-character arguments of `\frac` their braces: `\frac12`, `\frac1{72}`."""
    first, *rest = text.split("\\frac")
    parts = [first]
    for part in rest:
        if not part.startswith("{") and len(part) < 2:
            return text
        if not part.startswith("{"):
            denominator = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            part = f"{{{part[0]}}}{denominator}{part[2:]}"
        parts.append("\\frac" + part)
    return "".join(parts)


def infix_form(answer: str) -> str:
    """Return the answer as lower-case one-line formula without spaces, units, currency, percent."""
    whole = _WHOLE_TEXT.search(answer)
    text = whole.group(1) if whole is not None else answer
    text = text.replace("\\%", "").replace("\\$", "").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _MAGNITUDES.items():
        text = text.replace(word, factor)
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *(\\circ|\{\\circ\})", "", text)
    if text.startswith("{") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if "\\" in text or "^{" in text:
        text = one_line(text).strip()
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"-(\d+) +(\d+ */ *\d+)", r"-(\1+\2)", text)  # a mixed number
    text = re.sub(r"(\d) +(\d+ */ *\d+)", r"\1+\2", text)
    text = re.sub(r"[ {}]", "", text).lower()
    integer = as_integer(text)
    return text if integer is None else integer


def as_integer(text: str) -> str | None:
    """Return the digits of an integer written as `1,234`, `18.0` or `1e3`; None for anything else.

    A decimal within 1e-7 of an integer counts as that integer.
    """
    plain = without_thousands(text.strip())
    if len(plain) > _MAX_NUMBER_CHARACTERS or _NUMBER.fullmatch(plain) is None:
        return None
    value = Fraction(plain)
    nearest = round(value)
    return str(nearest) if abs(value - nearest) <= _INTEGER_TOLERANCE else None


def without_thousands(text: str) -> str:
    """Return the text without the commas that stand between groups of three digits."""
    previous = None
    while previous != text:
        previous, text = text, re.sub(r"(\d),(\d\d\d)($|\D)", r"\1\2\3", text)
    return text


def one_line(text: str) -> str:
    r"""Return LaTeX as a one-line formula: `\frac{a+b}{c}` is ` (a+b)/c`, `x^{12}` is `x^12`.

    An unknown command stays as it is, so that it can be compared as text but not evaluated.
    """
    out: list[str] = []
    place = 0
    while place < len(text):
        piece, place = _piece(text, place)
        out.append(piece)
    return "".join(out)


def _piece(text: str, place: int) -> tuple[str, int]:
    """Return the formula of what stands at `place`, and the place behind it."""
    character = text[place]
    if character == "^":
        exponent, after = _argument(text, place + 1)
        return "^" + _wrapped(exponent), after
    if character == "{":
        return _argument(text, place)
    command = _COMMAND.match(text, place)
    if command is None:
        return character, place + 1
    name, after = command.group(1), command.end()
    if name in _FRACTIONS:
        above, after = _argument(text, after)
        below, after = _argument(text, after)
        return f" {_wrapped(above)}/{_wrapped(below)}", after
    if name == "sqrt":
        degree = ""
        if text.startswith("[", after) and "]" in text[after:]:
            end = text.index("]", after)
            degree, after = one_line(text[after + 1 : end]), end + 1
        inner, after = _argument(text, after)
        return (f"({inner})^(1/({degree}))" if degree else f"sqrt({inner})"), after
    if name in _TEXTS:
        return _argument(text, after)
    return _SYMBOLS.get(name, f"\\{name}"), after


def _argument(text: str, place: int) -> tuple[str, int]:
    """Return the formula of a command's argument (a group or one piece), and the place behind."""
    while place < len(text) and text[place] == " ":
        place += 1
    if place == len(text):
        return "", place
    if text[place] != "{":
        return _piece(text, place)
    end = _closing(text, place)
    if end is None:
        return one_line(text[place + 1 :]), len(text)
    return one_line(text[place + 1 : end]), end + 1


def _wrapped(formula: str) -> str:
    formula = formula.strip()
    return formula if _SIMPLE.fullmatch(formula) else f"({formula})"
