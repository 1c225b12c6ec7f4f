"""The GSM8K reward: which answer is final, what number it states, what it earns."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from engines.rewards.gsm8k import final_answer, number, score
from model_specs.run_spec import RewardSpec

EXACT = RewardSpec(name="gsm8k")
CREDIT = RewardSpec(name="gsm8k", format_credit=0.25)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("18.0", 18),
        ("18.", 18),
        ("018", 18),
        ("+18", 18),
        ("-18", -18),
        ("- 18", -18),
        ("\u221218", -18),
        ("-0", 0),
        ("1,234", 1234),
        ("12,345,678.50", Fraction("12345678.5")),
        ("1{,}000", 1000),
        ("$18", 18),
        ("\\$18", 18),
        ("$ 1,234.50", Fraction("1234.5")),
        ("-$5", -5),
        ("$-5", -5),
        ("18 dollars", 18),
        ("18 eggs.", 18),
        ("18\\text{ cm}^2", 18),
        ("18 cm^2", 18),
        ("18 km/h", None),
        ("\\text{18}", 18),
        ("50%", 50),
        ("50 \\%", 50),
        ("3/4", Fraction(3, 4)),
        ("36/2", 18),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\dfrac{36}{2}", 18),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        ("2 1/2 hours", Fraction(5, 2)),
        (".5", Fraction(1, 2)),
        ("0.50", Fraction(1, 2)),
        ("x = 5", 5),
        ("2 + 3 = 5", 5),
        ("**18**", 18),
        ("(18)", 18),
        ("\\left(18\\right)", 18),
        ("18\\,000", None),
        ("", None),
        ("five", None),
        ("about 18", None),
        ("3 or 4", None),
        ("2+2", None),
        ("5 - 3", None),
        ("3 x 4", None),
        ("1,8", None),
        ("1 234", None),
        ("3:30", None),
        ("1e3", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_number_of_an_answer(text: str, value: Fraction | int | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{18}", "18"),
        ("\\boxed{1} then \\boxed{18}.", "18"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{18}}", "18"),
        ("\\boxed{\\text{about {18}}}", "\\text{about {18}}"),
        ("\\boxed{18} but \\boxed{2", "18"),
        ("\\boxed{18} and \\boxed{}", "18"),
        ("#### 18", "18"),
        ("a\n####18\n", "18"),
        ("#### 1\n#### 18", "18"),
        ("#### 18\n#### ", "18"),
        ("\\boxed{1}\n#### 18", "18"),
        ("#### 1\n\\boxed{18}", "18"),
        ("#### \\boxed{18}", "18"),
        ("the answer is 18", None),
        ("### 18", None),
        ("", None),
        ("\\boxed{", None),
    ],
)
def test_final_answer_is_the_last_complete_one(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "label", "exact", "credit"),
    [
        ("#### 18", "18", 1.0, 1.0),
        ("#### $18.00", "18", 1.0, 1.0),
        ("\\boxed{70,000}", "70000", 1.0, 1.0),
        ("\\boxed{70000}", "70,000", 1.0, 1.0),
        ("#### -3", "-3", 1.0, 1.0),
        ("#### 3", "-3", 0.0, 0.25),
        ("#### 1.8", "18", 0.0, 0.25),
        ("#### 180", "18", 0.0, 0.25),
        ("\\boxed{18} \\boxed{19}", "18", 0.0, 0.25),
        ("18", "18", 0.0, 0.0),
        ("#### eighteen", "18", 0.0, 0.0),
        ("#### 18 or 19", "18", 0.0, 0.0),
        ("#### Paris.", "paris", 1.0, 1.0),
        ("#### London", "paris", 0.0, 0.0),
        ("", "18", 0.0, 0.0),
    ],
)
def test_score_without_and_with_format_credit(
    text: str, label: str, exact: float, credit: float
) -> None:
    assert score(text, label, EXACT, finish_reason="stop") == exact
    assert score(text, label, CREDIT, finish_reason="stop") == credit


def test_an_answer_that_was_cut_off_does_not_count() -> None:
    assert score("#### 18", "18", CREDIT, finish_reason="length") == 0.0
    assert score("#### 18\n", "18", CREDIT, finish_reason="length") == 1.0
    assert score("\\boxed{18}", "18", CREDIT, finish_reason="length") == 1.0
    assert score("#### 18\n#### 1", "18", CREDIT, finish_reason="length") == 1.0


def test_long_runs_of_blanks_and_of_open_boxes_take_no_time() -> None:
    began = time.perf_counter()
    for text in ("#### \\frac{" + " " * 20000 + "x\n", "\\boxed{" * 20000, "{" * 20000):
        assert score(text, "1", EXACT, finish_reason="stop") == 0.0
    assert time.perf_counter() - began < 5  # the blanks alone once took hours
