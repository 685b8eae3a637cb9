"""`reward.reward_model`: a model behind HTTP that grades responses."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sluice.config.section import PositiveFloat, PositiveInt, Section


class RewardModelConfig(Section, frozen=True):
    """A server with OpenAI's chat completions, its question, and how its reply is read."""

    enable: Annotated[
        bool, Meta(description="Grade with a model; sluice starts no server for it.")
    ] = False
    base_url: Annotated[
        str | None,
        Meta(description="Address of the server up to chat/completions, usually ending in /v1."),
    ] = None
    model_path: Annotated[
        str | None, Meta(description="Name of the model, as its server knows it.")
    ] = None
    prompt_template: Annotated[
        str | None,
        Meta(
            description=(
                "The question, with {question}, {response}, {ground_truth}, {data_source} and "
                "{extra_info.KEY}; none: asks for a number from 0 to 1."
            )
        ),
    ] = None
    score_pattern: Annotated[
        str | None,
        Meta(description="Regular expression of the score, its last match; none: any number."),
    ] = None
    min_score: Annotated[float, Meta(description="Lower scores are refused.")] = 0.0
    max_score: Annotated[float, Meta(description="Higher scores are refused.")] = 1.0
    max_tokens: Annotated[PositiveInt, Meta(description="Longest reply, tokens.")] = 512
    request_timeout_s: Annotated[
        PositiveFloat, Meta(description="Seconds one request may take.")
    ] = 8.0
    max_attempts: Annotated[PositiveInt, Meta(description="Requests for one response.")] = 3
    api_key_env: Annotated[
        str | None, Meta(description="Environment variable with the server's key.")
    ] = None
