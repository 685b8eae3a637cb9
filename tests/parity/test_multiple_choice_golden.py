r"""The DianJin rule: the letters A to G in the last box equal the reference's."""

from __future__ import annotations

import pytest

from services.reward.grading.scorers.boxed import choice_score
from sluice.errors import DataError

VERDICTS = [
    (r"\boxed{A}", "A", 1.0),
    (r"\boxed{B}", "A", 0.0),
    (r"\boxed{C, A}", "AC", 1.0),
    (r"\boxed{A}", "AC", 0.0),
    (r"\boxed{A, B, C}", "AC", 0.0),
    (r"\boxed{AAC}", "CA", 1.0),
    (r"\boxed{\text{A}}", "A", 1.0),
    (r"\boxed{a}", "A", 0.0),
    (r"\boxed{H}", "A", 0.0),
    (r"\boxed{H A}", "A", 1.0),
    (r"\boxed{A} or \boxed{B}", "B", 1.0),
    (r"\boxed{A} or \boxed{B", "A", 0.0),
    ("The answer is A", "A", 0.0),
    (r"\boxed{}", "A", 0.0),
]


@pytest.mark.parametrize(("response", "truth", "score"), VERDICTS)
def test_choices_are_compared_as_sets_of_letters(response: str, truth: str, score: float) -> None:
    assert choice_score(response, truth) == score


def test_a_reference_without_letters_can_be_met_by_nothing_and_is_refused() -> None:
    with pytest.raises(DataError, match="ground_truth '7' holds none of the letters"):
        choice_score(r"\boxed{}", "7")
