"""Calls to an environment: encode tasks and answers; check and decode what it observes."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.algorithm.episode_rules import Observation
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.codec.fields import check_count, check_name
from sluice.codec.reward import row_json, score_from_proto
from sluice.codec.rollout import MAX_TURNS, check_turns
from sluice.codec.tools import (
    answer_to_proto,
    check_role,
    check_tools,
    message_from_proto,
    message_to_proto,
    tools_from_proto,
    tools_to_proto,
)
from sluice.codec.turns import finish_reason_to_proto
from sluice.errors import InvalidRequestError
from sluice.types import LARGEST_NUMBER, Answer, FinishReason, Prompt, Scored

MAX_METRICS, MAX_PREDICTION_CHARS = 64, 1000
"""Of a score; the rest of a prediction is cut."""


def open_to_proto(
    prompt: Prompt, *, episode_id: str, environment_name: str, seed: int, timeout_s: float
) -> environment.OpenRequest:
    """Encode the task of an episode.

    Args:
        prompt: the row.
        episode_id: unique, at most 128 bytes.
        environment_name: the row's environment; empty: the server's only one.
        seed: the same for all samples of a group.
        timeout_s: seconds after which the server may drop the episode.
    """
    return environment.OpenRequest(
        episode_id=episode_id,
        environment=environment_name,
        messages=[message_to_proto(message) for message in prompt.messages],
        row_json=row_json(prompt),
        seed=seed,
        timeout_s=timeout_s,
    )


def step_to_proto(
    episode_id: str, turn: int, answer: Answer, finish: FinishReason
) -> environment.StepRequest:
    """Encode an answer of the policy, which may end the episode."""
    return environment.StepRequest(
        episode_id=episode_id,
        turn=turn,
        answer=answer_to_proto(answer),
        finish_reason=finish_reason_to_proto(finish),
        may_end=True,
    )


def observation_from_proto(message: environment.Observation) -> Observation:
    """Check and decode an observation.

    Raises:
        InvalidRequestError: a message, a tool or the reward cannot be used.
    """
    field = "observation"
    check_turns(f"{field}.messages", message.messages, MAX_TURNS)
    for index, turn in enumerate(message.messages):
        check_role(f"{field}.messages[{index}]", turn, is_whole=message.is_whole)
    check_tools(f"{field}.tools", message.tools)
    if message.tools and message.drops_tools:
        raise InvalidRequestError(
            f"{field}.drops_tools: true together with {len(message.tools)} tools; send one of them"
        )
    reward = message.reward if message.HasField("reward") else None
    if reward is not None:
        _check_number(f"{field}.reward", reward)
    return Observation(
        tuple(map(message_from_proto, message.messages)),
        message.is_whole,
        tools_from_proto(message.tools),
        message.done,
        reward,
        message.drops_tools,
    )


def observation_to_proto(observation: Observation) -> environment.Observation:
    """Encode an observation."""
    return environment.Observation(
        messages=[message_to_proto(message) for message in observation.messages],
        is_whole=observation.is_whole,
        tools=tools_to_proto(observation.tools),
        done=observation.done,
        reward=observation.reward,
        drops_tools=observation.drops_tools,
    )


def grade_from_proto(message: environment.CloseResponse) -> Scored | None:
    """Check and decode an episode's score, its further numbers included; ``None``: it has none.

    Raises:
        InvalidRequestError: a number does not fit float32, or there are too many metrics, or one's
            name cannot be shown.
    """
    if not message.HasField("score"):
        return None
    scored = score_from_proto(message.score)
    metrics: Mapping[str, float] = {**scored.metrics, **message.metrics}
    check_count("metrics", metrics, MAX_METRICS)
    for name in metrics:
        check_name("metrics", name)
    for name, value in {"score": scored.score, **metrics}.items():
        _check_number(f"score.{name}", value)
    prediction = None if scored.prediction is None else scored.prediction[:MAX_PREDICTION_CHARS]
    return Scored(scored.score, scored.score, metrics, prediction)


def _check_number(field: str, value: float) -> None:
    if not abs(value) <= LARGEST_NUMBER:
        raise InvalidRequestError(
            f"{field}: {value}; send a finite number of at most {LARGEST_NUMBER:.2g}"
        )
