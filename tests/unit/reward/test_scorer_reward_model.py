"""Asking a reward model: the question, the number in its reply, and impossible settings."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from services.reward.grading.scorers.reward_model import (
    LAST_NUMBER,
    RewardModelScorer,
    fill_template,
    parse_score,
)
from sluice.config.schema.reward import RewardModelConfig
from sluice.errors import ConfigError, DataError, PeerError

SETTINGS = RewardModelConfig(enable=True, base_url="http://127.0.0.1:1/v1", model_path="judge")
CALL = {
    "question": "2+2?",
    "response": "4",
    "ground_truth": "4",
    "data_source": "sums",
    "extra_info": {"level": 3},
}


def number(reply: str, **changes: Any) -> float:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return parse_score(reply, re.compile(settings.score_pattern or LAST_NUMBER), settings)


@pytest.mark.parametrize(
    ("reply", "score"),
    [("1", 1.0), ("0.25", 0.25), (".5", 0.5), ("First 0.2, in the end 0.75.", 0.75), ("1e-1", 0.1)],
)
def test_the_last_number_of_a_reply_is_the_score(reply: str, score: float) -> None:
    assert number(reply) == score


@pytest.mark.parametrize("reply", ["", "very good", "NaN", "inf", "7", "-0.5", "1 of 10", "1e999"])
def test_a_reply_without_a_number_in_the_bounds_is_no_score(reply: str) -> None:
    with pytest.raises(PeerError, match="reward model"):
        number(reply)


def test_a_pattern_may_choose_the_number_by_its_group() -> None:
    assert number("Grade: 4/5 (4 of 5)", score_pattern=r"Grade: (\d)", max_score=5.0) == 4.0
    with pytest.raises(PeerError, match="no number from"):
        number("Grade: x", score_pattern=r"Grade: (\d)?", max_score=5.0)


def test_what_is_filled_in_is_not_filled_again() -> None:
    template = "{question} {response} {extra_info.level} {data_source} {other} {{}}"
    call = {**CALL, "response": "{ground_truth}"}
    assert fill_template(template, call) == "2+2? {ground_truth} 3 sums {other} {{}}"


def test_a_row_that_lacks_what_the_template_asks_for_is_reported() -> None:
    with pytest.raises(DataError, match=r"\{extra_info\.rubric\}, which the row lacks"):
        fill_template("{extra_info.rubric}", CALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "localhost:8000"}, r"base_url = 'localhost:8000' is no URL"),
        ({"base_url": "ftp://host/v1"}, "base_url"),
        ({"base_url": "http://host:port/v1"}, "base_url"),
        ({"base_url": "http://"}, "base_url"),
        ({"score_pattern": "("}, "score_pattern"),
        ({"api_key_env": "NO_SUCH_VARIABLE_HERE"}, "NO_SUCH_VARIABLE_HERE"),
        ({"base_url": None}, "base_url is not set"),
        ({"model_path": None}, "model_path is not set"),
        ({"min_score": 1.0, "max_score": 0.0}, "min_score"),
    ],
)
def test_impossible_settings_are_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.reward_model.*{message}"):
        RewardModelScorer(msgspec.structs.replace(SETTINGS, **change), 10.0)
