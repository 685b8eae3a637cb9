r"""Golden verdicts of verl's MATH scorer (`verl/utils/reward_score/math_reward.py`)."""

from __future__ import annotations

import pytest

from services.reward.grading.scorers.boxed import math_score
from services.reward.grading.scorers.latex import MalformedLatexError, normal_form, same_answer

VERDICTS = [
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{3/4}", r"\frac{3}{4}", 1.0),
    (r"\boxed{x=5}", "5", 1.0),
    (r"\boxed{xyz=5}", "5", 0.0),
    (r"\boxed{5\%}", "5", 1.0),
    (r"\boxed{5%}", "5", 0.0),
    (r"\boxed{50^\circ}", "50", 1.0),
    (r"\boxed{50^{\circ}}", "50", 1.0),
    (r"\boxed 5", "5", 1.0),
    (r"$\boxed 5$ is it", "5", 1.0),
    (r"\boxed 5 and \boxed{6}", "6", 0.0),  # what follows "\boxed " wins over any braces
    (r"\boxed{1,000}", "1000", 0.0),
    (r"\fbox{5}", "5", 0.0),
    (r"\boxed{1}\fbox{5}", "1", 1.0),
    ("Answer: 5", "5", 0.0),
    (r"\boxed{5} no, \boxed{6}", "6", 1.0),
    (r"\boxed{5} no, \boxed{6}", "5", 0.0),
    (r"\boxed{5} no, \boxed{6", "5", 0.0),
    (r"\boxed{5}" + "x" * 1000, "5", 1.0),  # the whole response counts
    (r"\boxed{5 \text{ cm}}", "5", 1.0),
    (r"\boxed{\text{ cm}\text{ cm}}", "", 0.0),
    (r"\boxed{\dfrac{1}{2}}", r"\tfrac12", 1.0),
    (r"\boxed{\left(1, 2\right)}", "(1,2)", 1.0),
    (r"\boxed{.5}", "0.5", 1.0),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", 1.0),
    (r"\boxed{\frac}", r"\frac", 1.0),  # no normal form: compared as it stands
    (r"\boxed{2\sqrt}", r"2 \sqrt", 0.0),
    (r"\boxed{}", "", 1.0),
    ("", "", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), VERDICTS)
def test_math_verdicts_equal_verls(response: str, truth: str, score: float) -> None:
    assert math_score(response, truth) == score


NORMAL_FORMS = [
    ("1 + 1", "1+1"),
    ("a\nb", "ab"),
    (r"5\!000", "5000"),
    (r"\\frac12", r"\frac{1}{2}"),
    (r"\frac1{72}", r"\frac{1}{72}"),
    (r"\frac{72}1", r"\frac{72}1"),
    (r"\frac12x", r"\frac{1}{2}x"),
    (r"\frac1\frac12", r"\frac1\frac12"),
    (r"\$18.90", "18.90"),
    (r"{.5}", "{0.5}"),
    ("x = .5", r"\frac{1}{2}"),
    ("y=2x", "2x"),
    ("x^2=4", "x^2=4"),
    ("-3/4", r"\frac{-3}{4}"),
    ("03/4", "03/4"),
    ("a/b", "a/b"),
    ("1/2/3", "1/2/3"),
    ("0.25", "0.25"),
    (r"\sqrt3+\sqrt{12}", r"\sqrt{3}+\sqrt{12}"),
    (r"12\text{ apples}", "12"),
    (r"12\text{apples}", r"12\text{apples}"),
]


@pytest.mark.parametrize(("answer", "form"), NORMAL_FORMS)
def test_normal_forms_equal_verls(answer: str, form: str) -> None:
    assert normal_form(answer) == form


@pytest.mark.parametrize("answer", [r"\frac", r"2\sqrt", r"\text{ a}\text{ b}", r"\frac\frac12"])
def test_an_answer_without_normal_form_is_compared_as_it_stands(answer: str) -> None:
    with pytest.raises(MalformedLatexError):
        normal_form(answer)
    assert same_answer(answer, answer)
    assert not same_answer(answer, answer + " ")
