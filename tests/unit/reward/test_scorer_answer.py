"""What scorers return becomes a number only if it is one."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from services.reward.grading.messages import ScoreReply, ScorerNumber, ScorerRefusal, frame
from services.reward.grading.scorer_main import (
    MAX_DETAIL_CHARS,
    MAX_KEY_CHARS,
    MAX_KEYS,
    MAX_PREDICTION_CHARS,
    answer_of,
    refusal,
)
from sluice.types import LARGEST_NUMBER


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        *((1, 1.0), (True, 1.0), (-0.5, -0.5), (Fraction(1, 2), 0.5), (np.array(2.5), 2.5)),
        *((np.float32(0.25), 0.25), (np.int64(3), 3.0), (np.True_, 1.0), (np.array([0.5]), 0.5)),
    ],
)
def test_a_number_is_score_and_accuracy(returned: object, score: float) -> None:
    assert answer_of(returned) == ScorerNumber(score, {"acc": score})


class _OneNamedRow:
    """As pandas' Series of one row with a name: its element has no key 0."""

    shape = (1,)

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __getitem__(self, key: object) -> float:
        raise self._error(key)

    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize("error", [KeyError, IndexError, TypeError])
def test_one_element_without_a_key_of_0_counts_by_its_float(error: type[Exception]) -> None:
    assert answer_of(_OneNamedRow(error)) == ScorerNumber(1.0, {"acc": 1.0})
    assert answer_of({"score": _OneNamedRow(error)}) == ScorerNumber(1.0, {})


@pytest.mark.parametrize("score", [LARGEST_NUMBER, -LARGEST_NUMBER])
def test_a_score_may_be_as_large_as_float32_holds(score: float) -> None:
    assert answer_of(score) == ScorerNumber(score, {"acc": score})
    assert answer_of({"score": score}) == ScorerNumber(score, {})


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
        np.float64("nan"),
        1j,
        10**400,
        1e39,
        {"score": -1.7e308},
        [math.nan],
        {},
        {"score": None},
        {"score": [1.0]},
        {"score": 1.0} | {f"metric {i}": 1.0 for i in range(MAX_KEYS)},
        {"score": 1.0, "k" * (MAX_KEY_CHARS + 1): 1.0},
    ],
)
def test_anything_else_is_refused(returned: object) -> None:
    assert isinstance(answer_of(returned), ScorerRefusal)


def test_a_mapping_without_acc_gives_none() -> None:
    assert answer_of({"score": 0.5}) == ScorerNumber(0.5, {})


def test_a_refusal_stays_short_whatever_was_returned() -> None:
    answer = answer_of(["x" * 10**6] * 10**6)
    assert isinstance(answer, ScorerRefusal)
    assert len(answer.detail) <= MAX_DETAIL_CHARS
    assert len(refusal("x" * 10**6).detail) == MAX_DETAIL_CHARS


def test_text_that_utf8_cannot_hold_does_not_keep_an_answer_from_being_sent() -> None:
    answers = (answer_of({"score": 1.0, "pred": "\ud800", "\udfff": 1}), refusal("\ud800"))
    assert frame(ScoreReply(1, answers))
    assert answers[0] == ScorerNumber(1.0, {"?": 1.0}, "?")


def test_a_prediction_is_cut() -> None:
    answer = answer_of({"score": 1.0, "pred": "x" * 10**6})
    assert answer == ScorerNumber(1.0, {}, "x" * MAX_PREDICTION_CHARS)
