"""Golden verdicts of verl's gsm8k scorer, both methods (`verl/utils/reward_score/gsm8k.py`)."""

from __future__ import annotations

import pytest

from services.reward.grading.scorers.gsm8k import compute_score, final_number

# response, reference, strict score, flexible score
VERDICTS = [
    ("#### 1,234", "1234", 1.0, 0.0),  # only the strict way removes separators
    ("#### 13", "13", 1.0, 1.0),
    ("#### 13.", "13", 0.0, 0.0),
    ("#### $13", "13", 0.0, 1.0),
    ("####13", "13", 0.0, 1.0),
    ("the answer is 13", "13", 0.0, 1.0),
    ("the answer is 13 .", "13", 0.0, 1.0),
    ("the answer is 13.", "13", 0.0, 0.0),
    ("#### -7", "-7", 1.0, 1.0),
    ("#### 7.0", "7", 0.0, 0.0),
    ("#### 12\n#### 13", "13", 1.0, 1.0),
    ("#### 13\n#### 12", "13", 0.0, 0.0),
    ("#### 13 then 12", "13", 1.0, 0.0),
    ("#### 13" + " " * 293, "13", 1.0, 1.0),
    ("#### 13" + " " * 294, "13", 0.0, 1.0),  # the marks are no longer among the last 300
    ("#### 13" + " " * 300, "13", 0.0, 0.0),
    ("no number", "13", 0.0, 0.0),
    ("", "13", 0.0, 0.0),
]


@pytest.mark.parametrize(("response", "truth", "strict", "flexible"), VERDICTS)
def test_gsm8k_verdicts_equal_verls(
    response: str, truth: str, strict: float, flexible: float
) -> None:
    assert compute_score(response, truth) == strict
    assert compute_score(response, truth, method="flexible") == flexible


def test_a_lone_point_is_no_number() -> None:
    assert final_number("It is 13 .", "flexible") == "13"
    assert final_number("...", "flexible") == "..."
    assert final_number(".", "flexible") is None
