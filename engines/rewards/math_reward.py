r"""`math`: the last `\boxed{...}` of a completion against the label, as the peers grade it; 1 or 0.

Equal as LaTeX text in one spelling, or equal as formulas: element by element in a tuple or interval
with the same brackets, where an unreduced fraction is wrong, an integer label asks for an integer,
and everything else is compared by sympy. The verdicts are those of the grader that slime, verl and
DeepScaleR share, except:

- sympy has no clock and no general simplification: formulas of bounded size are compared exactly
  or to 40 digits (`engines.rewards.expressions`). An equality that a simplification would miss
  counts, and nothing depends on how fast the machine is or on what was graded before.
- a fraction, a root and a power take their whole argument: `\frac{x+1}{2}` is `(x+1)/2`. The peers
  read `x+1/2`, so they call it equal to `x + \frac12` and not to `\frac x2 + \frac12`.
- a negative mixed number is `-(3+1/2)`; the peers read `-3+1/2`.
- `\ln 8` is a logarithm; the peers read the product of l, n and 8.
- exponents of two and more digits or in brackets (`x^{12}`, `x^(1/3)`) are evaluated within the
  limits; the peers compare them as text.
- decimals are exact rationals; the peers subtract binary ones.
- Greek letters other than `\pi` and unknown commands are compared as text only.
- an answer of more than `MAX_FORMULA_CHARACTERS` characters is compared as LaTeX text only.
"""

from __future__ import annotations

import re

from engines.rewards.expressions import equal
from engines.rewards.math_answers import (
    BOX,
    as_integer,
    infix_form,
    last_box,
    latex_form,
    without_thousands,
)
from model_specs.run_spec import RewardSpec

MAX_FORMULA_CHARACTERS = 200
"""A longer answer or label is not read as a formula."""

_BRACKETS = "()[]"
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")


def score(
    completion_text: str,
    label: str,
    spec: RewardSpec,
    *,
    finish_reason: str,
    metadata: object = None,
) -> float:
    r"""Return 1.0 when the last box holds the label, else 0.0.

    Args:
        completion_text: Decoded completion.
        label: The right answer, or a text with it in a `\boxed{...}`.
        spec: Not read; this reward has no options.
        finish_reason: Not read: a box that closed is an answer, also when cut off behind it.
        metadata: Not read.
    """
    answer = last_box(completion_text)
    wanted = last_box(label) if BOX in label else label
    if answer is None or not wanted:
        return 0.0
    return 1.0 if same_answer(answer, wanted) else 0.0


def same_answer(answer: str, label: str) -> bool:
    """Return whether two answers are the same, by their text or as formulas."""
    if latex_form(answer) == latex_form(label):
        return True
    if max(len(answer), len(label)) > MAX_FORMULA_CHARACTERS:
        return False
    found, wanted = infix_form(answer), infix_form(label)
    if found == wanted:
        return True
    if not found:
        return False
    found_parts, wanted_parts = _elements(found), _elements(wanted)
    if len(found_parts) != len(wanted_parts):
        return False
    if len(wanted_parts) > 1 and (found[0], found[-1]) != (wanted[0], wanted[-1]):
        return False
    return all(map(_same_element, found_parts, wanted_parts))


def _elements(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; anything else is one element."""
    text = without_thousands(text)
    inner = text[1:-1]
    is_tuple = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if is_tuple and not any(bracket in inner for bracket in _BRACKETS):
        return inner.split(",")
    return [text]


def _same_element(found: str, wanted: str) -> bool:
    if _FRACTION.fullmatch(found) and _FRACTION.fullmatch(wanted):
        return found == wanted
    if (as_integer(found) is None) != (as_integer(wanted) is None):
        return False
    return equal(found, wanted)
