r"""Golden scores of verl's geo3k scorer; its grader mathruler 0.1.0 gave the verdicts."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.grading.scorers.geo3k import compute_score, same_value
from services.reward.grading.scorers.math_expression import NotAnExpressionError, tokens, value

SCORES = [
    (r"<think>so</think> \boxed{7}", "7", 1.0),
    (r"<think>so</think> \boxed{8}", "7", 0.1),
    (r"so \boxed{7}", "7", 0.9),
    (r"so \boxed{8}", "7", 0.0),
    ("<think>so</think> 7", "7", 0.0),
    (r" <think>so</think>\boxed{7}", "7", 0.9),
    (r"<think>so\boxed{7}</think>", "7", 0.9),
    ("<think>a\nb</think>\n\\boxed{7}\n", "7", 1.0),
    (r"<think></think>\boxed{", "7", 0.0),
    ("", "7", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), SCORES)
def test_geo3k_scores_equal_verls(response: str, truth: str, score: float) -> None:
    assert compute_score(response, truth) == score


SAME = [
    ("7.0", "7"),
    (r"\frac{11}{2}", "5.5"),
    (r"5\frac{1}{2}", "5.5"),
    ("5 1/2", r"\frac{11}{2}"),
    (r"2 \sqrt { 3 }", r"\sqrt{12}"),
    (r"\frac{\sqrt{3}}{2}", r"0.5\sqrt{3}"),
    (r"6\sqrt{3}+3\sqrt{39}", r"3\sqrt{39}+6\sqrt{3}"),
    (r"50^\circ", "50"),
    (r"50\%", "50"),
    ("50 cm", "50 degrees"),
    (r"50\text{cm}", "50"),
    ("1,000", "1000"),
    ("x=7", "7"),
    (r"\left(1,2\right)", "(1, 2)"),
    ("(0.5,3)", r"(\frac{1}{2},3)"),
    ("x+1", "1+x"),
    ("2x", "x*2"),
    (r"\text{Monday}", "monday"),
    ("3.50", r"\frac{7}{2}"),
    (r"5 \times 10", r"5\cdot 10"),
    (r"5\,\text{cm}", "5"),
    ("5~\\text{cm}", "5"),
    (r"5\mathrm{cm}", "5"),
    (r"5.5\, \mathrm{cm}", "5.5"),
    (r"\textbf{5}", "5"),
    (r"\mathbf{2.5}", "2.5"),
    (r"5 \quad", "5"),
    (r"50\degree", "50"),
    (r"50\degrees", "50"),
    ("1{,}000{,}000", "1000000"),
    (r"(1{,}2)", "(1, 2)"),
    ("50\\", "50"),
    (r"50\,^\circ", "50"),
    ("{5}", "5"),
    ("+5", "5"),
    (r"\(5\)", "5"),
    (r"\[ \frac{9\sqrt{5}}{3} \]", r"\frac{9\sqrt{5}}{3}"),
    (r"\(60^\circ\)", "60"),
    (r"6.3 \mathrm{~cm}", "6.3"),
    (r"2+3\sqrt{5} \mathrm{~cm}", r"2+3\sqrt{5}"),
    (r"\mathbf{(3, -1)}", "(3, -1)"),
    ("{3:4}", "3:4"),
    (r"\frac{9\sqrt{5}}{3}.", r"\frac{9\sqrt{5}}{3}"),
    (r"35\frac{1}{17} miles", r"35 \frac { 1 } { 17 }"),
    (r"\text{\frac{\sqrt{7}}{5}}", r"\frac { \sqrt { 7 } } { 5 }"),
    (r"\text{52.50\text{ feet}}", "52.5"),
    (r"25\text{ cm}^2", "25"),
    (r"\left(\frac {5}{6}, 1\right) cm^2", r"(\frac {5}{6}, 1)"),
]
SAME_HERE_ONLY = [
    (r"\pi 8", r"8 \pi"),
    ("1/3", "0.3333333333333333"),
]
DIFFERENT = [
    ("8", "7"),
    ("7.01", "7"),
    (r"\sqrt{4}", "2"),  # an integer must be written as one
    ("2/4", "1/2"),  # and a fraction reduced
    ("2^3", "8"),
    (r"\frac{40}{6}", r"\frac { 20 } { 3 }"),
    (r"\sqrt12", r"\sqrt{12}"),  # TeX's argument is one digit
    (r"25\text{cm}^2", "25"),  # what is left of the unit is a power
    (r"5\sqrt{3}\text{ cm}^2", r"5 \sqrt { 3 }"),
    (r"50.0^{\circ}", "50"),  # an integer in one spelling of degrees only
    ("0.33", "1/3"),
    ("(1,2)", "(2,1)"),
    ("[1,2]", "(1,2)"),
    ("2x", "2y"),
    ("A", "B"),
    ("Monday", "Sunday"),
    ("", "7"),
    ("None", "7"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_answers_that_mathruler_takes_for_equal_are_equal(answer: str, truth: str) -> None:
    assert same_value(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), SAME_HERE_ONLY)
def test_spellings_that_mathruler_misses_are_equal(answer: str, truth: str) -> None:
    assert same_value(answer, truth)
    assert same_value(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_answers_that_mathruler_tells_apart_differ(answer: str, truth: str) -> None:
    assert not same_value(answer, truth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1+2*3-4/2", 5.0),
        ("-2^2", -4.0),
        ("2^-1", 0.5),
        ("2(3+4)", 14.0),
        (r"\frac{1}{4}\sqrt{16}", 1.0),
        (r"\sqrt[3]{27}", 3.0),
        (r"\pi2", 2 * math.pi),
        (r"2\pi", 2 * math.pi),
        ("--3", 3.0),
    ],
)
def test_expressions_have_their_value(text: str, expected: float) -> None:
    assert value(tokens(text), {}) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1/0",
        "(1",
        "1)",
        "{1]",
        "1+",
        r"\sqrt{-1}",
        "9^9^9",
        "10^999",
        "1 & 2",
        r"\frac12",
        "(" * 60,
    ],
)
def test_what_has_no_value_is_refused(text: str) -> None:
    with pytest.raises(NotAnExpressionError):
        value(tokens(text), {})


TERMS = st.recursive(
    st.integers(1, 40).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        lambda term: (
            f"({term[0][0]}{term[1]}{term[2][0]})",
            _apply(term[1], term[0][1], term[2][1]),
        )
    ),
    max_leaves=8,
)


def _apply(sign: str, left: Fraction, right: Fraction) -> Fraction:
    if sign == "/":
        return left / right if right else left
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


@settings(deadline=None)
@given(TERMS)
def test_values_equal_exact_arithmetic(term: tuple[str, Fraction]) -> None:
    text, exact = term
    try:
        found = value(tokens(text), {})
    except NotAnExpressionError:
        return  # divides by zero, or is too long
    if "/(" not in text:  # dividing by a small difference magnifies rounding
        assert found == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
