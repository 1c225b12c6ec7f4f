"""Whether two formulas are equal, by sympy and within limits that do not depend on the clock.

A formula is parsed here (nothing is ever evaluated as code) into a sympy expression of bounded
size. Two expressions are equal when their difference is 0 exactly, or, where it is no rational
number, when it vanishes to 40 digits at four fixed points of each variable. That replaces a general
simplification, whose time has no bound and whose outcome depends on what was simplified before.

Usage::

    equal("(x+1)^2", "x^2+2x+1")     # True
    equal("sqrt(8)", "2sqrt(2)")     # True
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 300
"""A longer formula is not evaluated."""
MAX_LETTERS = 2
"""More different letters than this in the two formulas together are taken for words."""
MAX_DEPTH = 40
MAX_DIGITS = 60
"""Most characters of one number."""
MAX_BITS = 20_000
"""Most bits of a number that a power makes."""
MAX_EXPONENT = 1000

DIGITS = 60
"""Decimal digits of a numerical comparison."""
_MAX_WORKING_DIGITS = 400
_TOLERANCE_DIGITS = 40

_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|sqrt|pi|ln|[a-z]|[-+*/^()]")
_POINTS = (("2.71", "1.37"), ("0.43", "3.19"), ("-1.73", "0.61"), ("-0.29", "-2.33"))
"""Values of the first and second variable at the four points."""


class _NotAFormulaError(Exception):
    """The text is no formula, or one beyond the limits."""


def equal(first: str, second: str) -> bool:
    """Return whether two formulas are equal; False when either is none, or is beyond the limits.

    Args:
        first: Formula of numbers, `+ - * / ^ ( )`, `sqrt`, `ln`, `pi` and one-letter variables;
            juxtaposition multiplies.
        second: Another one.
    """
    if max(len(first), len(second)) > MAX_CHARACTERS or _num_letters(first + second) > MAX_LETTERS:
        return False
    try:
        return _same(_Parser(first).parse(), _Parser(second).parse())
    except _NotAFormulaError:
        return False


def _num_letters(text: str) -> int:
    return len({character for character in text.replace("sqrt", "") if character.isalpha()})


def _same(first: Any, second: Any) -> bool:
    difference = first - second
    if difference.is_Rational:
        return bool(difference == 0)
    variables = sorted(difference.free_symbols, key=str)
    points = _POINTS if variables else _POINTS[:1]
    return all(_vanishes(first, second, variables, point) for point in points)


def _vanishes(first: Any, second: Any, variables: list[Any], point: tuple[str, ...]) -> bool:
    """Return whether two expressions agree to 40 digits at a point where both are finite."""
    import sympy

    values = {
        variable: sympy.Rational(value)
        for variable, value in zip(variables, point[: len(variables)], strict=True)
    }
    at, other, difference = (
        expression.evalf(DIGITS, subs=values, maxn=_MAX_WORKING_DIGITS)
        for expression in (first, second, first - second)
    )
    if not all(value.is_number and value.is_finite for value in (at, other, difference)):
        return False
    scale = max(sympy.Integer(1), abs(at), abs(other))
    return bool(abs(difference) <= scale * sympy.Rational(1, 10**_TOLERANCE_DIGITS))


class _Parser:
    """Recursive descent over the tokens of one formula."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        if "".join(self._tokens) != text or not text:
            raise _NotAFormulaError
        self._place = 0
        self._depth = 0

    def parse(self) -> Any:
        """Return the sympy expression of the whole formula."""
        value = self._sum()
        if self._place != len(self._tokens):
            raise _NotAFormulaError
        return value

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token

    def _sum(self) -> Any:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = value + sign * self._product()
        return value

    def _product(self) -> Any:
        value = self._signed()
        while self._next() and self._next() not in ("+", "-", ")", "^"):
            if self._next() == "/":
                self._take()
                below = self._signed()
                if below == 0:
                    raise _NotAFormulaError
                value = value / below
            else:
                if self._next() == "*":
                    self._take()
                value = value * self._signed()
        return value

    def _signed(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAFormulaError
        if self._next() in ("+", "-"):
            value = self._signed() if self._take() == "+" else -self._signed()
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Any:
        base = self._atom()
        if self._next() != "^":
            return base
        self._take()
        return _raised(base, self._signed())

    def _atom(self) -> Any:
        import sympy

        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise _NotAFormulaError
            return value
        if token == "pi":
            return sympy.pi
        if token in ("sqrt", "ln"):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise _NotAFormulaError
            argument = self._atom()
            self._depth -= 1
            return _root(argument) if token == "sqrt" else _logarithm(argument)
        if token.isalpha():
            return sympy.Symbol(token)
        if not token or token in "+-*/^)" or len(token) > MAX_DIGITS:
            raise _NotAFormulaError
        value = Fraction(token)
        return sympy.Rational(value.numerator, value.denominator)


def _raised(base: Any, exponent: Any) -> Any:
    """Return a power whose value has a bounded size."""
    import sympy

    if exponent.is_Rational:
        if max(abs(exponent.p), exponent.q) > MAX_EXPONENT or (base == 0 and exponent <= 0):
            raise _NotAFormulaError
        if _bits(base) * abs(exponent.p) > MAX_BITS:
            raise _NotAFormulaError
        return _root(base, exponent) if exponent.q > 1 else base**exponent
    # A tower of powers has no bound, whatever it is made of.
    if exponent.has(sympy.Pow) or _bits(exponent) > MAX_DIGITS or base == 0:
        raise _NotAFormulaError
    return base**exponent


def _root(base: Any, exponent: Any = None) -> Any:
    """Return a root; of a number only a small one, since sympy takes its integer apart."""
    import sympy

    if _bits(base) > 2 * MAX_DIGITS:
        raise _NotAFormulaError
    return base ** (sympy.Rational(1, 2) if exponent is None else exponent)


def _logarithm(argument: Any) -> Any:
    import sympy

    if argument == 0 or _bits(argument) > MAX_BITS:
        raise _NotAFormulaError
    return sympy.log(argument)


def _bits(expression: Any) -> int:
    """Return an upper bound of the bits of any number in an expression."""
    import sympy

    return max(
        (
            int(number.p).bit_length() + int(number.q).bit_length()
            for number in expression.atoms(sympy.Rational)
        ),
        default=1,
    )
