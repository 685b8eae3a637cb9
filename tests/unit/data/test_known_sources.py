"""The table of data sources that the reward service routes by."""

from __future__ import annotations

import pytest

from services.reward.grading.scorers import registry
from sluice.data.scoring import DEFAULT_ROUTES, ROUTED_SCORERS, scorer_name


def test_every_scorer_of_the_reward_service_has_a_route_or_can_be_given_one() -> None:
    assert {*DEFAULT_ROUTES.values(), *ROUTED_SCORERS} == set(registry.RULES)
    assert not set(DEFAULT_ROUTES.values()) & set(ROUTED_SCORERS)


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("aime_2024", "math_dapo"),
        ("aime", "math_dapo"),
        ("HuggingFaceH4/MATH-500", "math_boxed"),
        ("poetry", None),
    ],
)
def test_a_source_leads_to_its_scorer(source: str, scorer: str | None) -> None:
    assert scorer_name(source) == scorer


def test_an_exact_name_wins_and_then_the_longest_beginning() -> None:
    routes = {"a*": "one", "ab*": "two", "abc": "three"}
    assert [scorer_name(name, routes) for name in ("abc", "ab1", "ac")] == ["three", "two", "one"]
