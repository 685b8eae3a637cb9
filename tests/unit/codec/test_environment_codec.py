"""What environment servers send is bounded before the run keeps it."""

from __future__ import annotations

import pytest

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.codec.environment import (
    MAX_METRICS,
    MAX_PREDICTION_CHARS,
    grade_from_proto,
    observation_from_proto,
)
from sluice.errors import InvalidRequestError
from sluice.types import LARGEST_NUMBER


def closed(score: float = 1.0, **metrics: float) -> environment.CloseResponse:
    return environment.CloseResponse(score=common.Score(score=score), metrics=metrics)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (closed(1e308), "score.score: 1e"),
        (closed(float("nan")), "score.score: nan"),
        (closed(acc=-1e39), "score.acc: -1e"),
        (closed(**{f"m{n}": 0.0 for n in range(MAX_METRICS + 1)}), "at most 64"),
        (closed(**{"a\nb": 0.0}), "unprintable"),
        (closed(**{"a" * 129: 0.0}), "at most 128"),
    ],
)
def test_a_score_that_the_run_cannot_keep_is_refused(
    response: environment.CloseResponse, said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said.replace(".", r"\.")):
        grade_from_proto(response)


def test_a_score_at_the_bounds_is_kept_and_a_long_prediction_is_cut() -> None:
    response = closed(LARGEST_NUMBER, **{f"m{n}": 0.0 for n in range(MAX_METRICS)})
    response.score.prediction = "a" * 5_000_000
    found = grade_from_proto(response)
    assert found is not None
    assert found.score == LARGEST_NUMBER
    assert found.prediction == "a" * MAX_PREDICTION_CHARS


@pytest.mark.parametrize("reward", [1e308, float("inf"), float("nan")])
def test_a_reward_of_a_turn_that_float32_cannot_hold_is_refused(reward: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"observation\.reward"):
        observation_from_proto(environment.Observation(reward=reward))


def test_an_observation_that_offers_tools_and_drops_them_is_refused() -> None:
    seen = environment.Observation(tools=[common.Tool(name="look")], drops_tools=True)
    with pytest.raises(InvalidRequestError, match=r"observation\.drops_tools"):
        observation_from_proto(seen)
