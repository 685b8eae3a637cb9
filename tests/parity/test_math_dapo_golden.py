"""Golden verdicts of verl's math_dapo scorer (`verl/utils/reward_score/math_dapo.py`)."""

from __future__ import annotations

import pytest

from services.reward.grading.scorers.latex import last_boxed
from services.reward.grading.scorers.math_dapo import compute_score, normalize_answer

VERDICTS = [
    ("Answer: 34", "34", True, "34"),
    ("answer : $34$.", "34", True, "34"),
    (r"Answer: \boxed{34}", "34", True, "34"),
    (r"so \boxed{34}", "34", True, "34"),
    ("Answer: 34.", "34", False, "34."),
    ("Answer: 34.0", "34", False, "34.0"),
    ("Answer: **34**", "34", False, "**34**"),
    ("Answer: 1,000", "1000", True, "1000"),
    ("Answer: x = 5", "5", True, "5"),
    (r"Answer: \frac12", r"\frac{1}{2}", True, r"\frac{1}{2}"),
    ("Answer: 0.5", "1/2", False, "0.5"),
    ("Answer: 5 km", "5", True, "5"),
    ("Answer: 33\nAnswer: 34", "34", True, "34"),
    ("Answer: 34\nAnswer: 33", "34", False, "33"),
    ("Answer: 34\n" + "x" * 300, "34", False, "[INVALID]"),
    ("Answer: 34\n" + "x" * 289, "34", True, "34"),
    ("Answer: 34\n" + "x" * 290, "34", False, "[INVALID]"),
    ("no answer at all", "34", False, "[INVALID]"),
    (r"\boxed{34}" + "x" * 100, "34", False, "[INVALID]"),
    (r"\boxed{1,000}", "1000", False, "1,000"),  # the fallback compares raw
    ("Answer: the $x$ and $y$", "x", True, "x"),
    (r"Answer: \sqrt2", r"\sqrt{2}", True, r"\sqrt{2}"),
    (r"Answer: \text{Monday}", "Monday", True, "Monday"),
    ("Answer: issued", "is" + "d", True, "isd"),  # "sue" is deleted even inside a word
]


@pytest.mark.parametrize(("solution", "truth", "right", "prediction"), VERDICTS)
def test_math_dapo_verdicts_equal_verls(
    solution: str, truth: str, right: bool, prediction: str
) -> None:
    expected = {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}
    assert compute_score(solution, truth) == expected


@pytest.mark.parametrize(("solution", "truth", "right", "prediction"), VERDICTS)
def test_without_the_fallback_boxes_count_for_nothing_as_in_verl_0_6(
    solution: str, truth: str, right: bool, prediction: str
) -> None:
    if "Answer:" not in solution and "answer :" not in solution:
        right, prediction = False, "[INVALID]"
    expected = {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}
    assert compute_score(solution, truth, boxed_fallback=False) == expected


def test_strict_box_verify_reads_the_last_box_only() -> None:
    both = r"Answer: 34 \boxed{1} \boxed{34}"
    assert compute_score(both, "34", strict_box_verify=True)["acc"]
    assert not compute_score("Answer: 34", "34", strict_box_verify=True)["acc"]


def test_without_the_required_box_there_is_no_prediction() -> None:
    found = compute_score("Answer: 34", "34", strict_box_verify=True)
    assert found == {"score": -1.0, "acc": False, "pred": None}


def test_boxes_nest_and_unclosed_boxes_count_for_nothing() -> None:
    assert last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\frac{1}{2}") is None


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        ("an apple", "apple"),
        (r"90^\circ", "90"),
        (r"\overline{AB}", "AB"),
        (r"\textbf{7}", "7"),
        ("12 dollars", "12"),
        ("10{,}000", "10000"),
        (r"x,\text{and}y", "x,y"),
    ],
)
def test_answers_lose_units_and_dress(answer: str, normalized: str) -> None:
    assert normalize_answer(answer) == normalized
