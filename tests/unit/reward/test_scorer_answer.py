"""What scorers return becomes a number only if it is one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from services.reward.scorer_answer import answer_of
from services.reward.scorer_messages import ScorerNumber, ScorerRefusal


@pytest.mark.parametrize(
    ("returned", "score"),
    [(1, 1.0), (True, 1.0), (-0.5, -0.5), (np.float32(0.25), 0.25), (Fraction(1, 2), 0.5)],
)
def test_a_number_is_score_and_accuracy(returned: object, score: float) -> None:
    assert answer_of(returned) == ScorerNumber(score, {"acc": score})


def test_of_a_sequence_the_first_element_counts() -> None:
    assert answer_of([0.5, "explanation"]) == ScorerNumber(0.5, {"acc": 0.5})


def test_numbers_of_a_mapping_become_metrics_and_pred_the_prediction() -> None:
    returned = {"score": 1.0, "acc": True, "format": 0.1, "pred": 34, "note": "fine", "none": None}
    assert answer_of(returned) == ScorerNumber(1.0, {"acc": 1.0, "format": 0.1}, "34")


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1.0",
        math.nan,
        -math.inf,
        [],
        object(),
        {"acc": 1.0},
        {"score": "1"},
        {"score": math.nan},
        {"score": 1.0, "acc": math.inf},
        np.ones(3),
        10**400,
    ],
)
def test_anything_else_is_refused(returned: object) -> None:
    assert isinstance(answer_of(returned), ScorerRefusal)
