"""`reward.*`: scorers, reward manager, reward model, custom reward functions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


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


class RewardManagerConfig(Section, frozen=True):
    """How a score becomes a reward."""

    name: Annotated[
        Literal["naive", "dapo", "gdpo"],
        Meta(
            description=(
                "naive: reward = score; dapo: overlong shaping is added; gdpo: as naive, the "
                "scorer's values are kept one by one."
            )
        ),
    ] = "dapo"


class OverlongBufferConfig(Section, frozen=True):
    """Soft punishment of responses close to the length limit (DAPO, eq. 13)."""

    enable: Annotated[bool, Meta(description="Add the penalty to the reward.")] = False
    len: Annotated[
        NonNegativeInt, Meta(description="Width of the zone before the limit, tokens.")
    ] = 0
    penalty_factor: Annotated[NonNegativeFloat, Meta(description="Penalty at the limit.")] = 0.0
    log: Annotated[bool, Meta(description="Report overlong and overlong_reward as metrics.")] = (
        False
    )


class RewardKwargsConfig(Section, frozen=True):
    """Settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = msgspec.field(default_factory=OverlongBufferConfig)
    max_resp_len: Annotated[
        PositiveInt | None,
        Meta(description="Length limit in the formula; none: data.max_response_length."),
    ] = None


class CustomRewardFunctionConfig(Section, frozen=True):
    """A scorer of the user's."""

    path: Annotated[
        str | None,
        Meta(description="Python file that defines it; none: built-in scorers by data_source."),
    ] = None
    name: Annotated[
        str,
        Meta(
            description=(
                "Function name: (data_source, solution_str, ground_truth, extra_info, **kwargs)."
            )
        ),
    ] = "compute_score"
    reward_kwargs: Annotated[
        dict[str, object], Meta(description="Further keyword arguments of the function.")
    ] = msgspec.field(default_factory=dict)


class ScorerPoolConfig(Section, frozen=True):
    """Limits of the processes that run scorers."""

    num_workers: Annotated[PositiveInt, Meta(description="Scorer processes.")] = 1
    timeout_s: Annotated[
        PositiveFloat,
        Meta(description="Wall-clock seconds one sample may take before its process is killed."),
    ] = 10.0
    memory_mb: Annotated[
        PositiveInt, Meta(description="Address space of a scorer process, MiB.")
    ] = 2048
    max_response_chars: Annotated[
        PositiveInt, Meta(description="Only this many last characters of a response are graded.")
    ] = 200_000


class RewardConfig(Section, frozen=True):
    """Grading."""

    reward_manager: RewardManagerConfig = msgspec.field(default_factory=RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = msgspec.field(default_factory=RewardKwargsConfig)
    custom_reward_function: CustomRewardFunctionConfig = msgspec.field(
        default_factory=CustomRewardFunctionConfig
    )
    scorer_pool: ScorerPoolConfig = msgspec.field(default_factory=ScorerPoolConfig)
    reward_model: RewardModelConfig = msgspec.field(default_factory=RewardModelConfig)
    scorer_routes: Annotated[
        dict[str, str],
        Meta(
            description=(
                "Built-in scorer of a data source, or of all that begin alike (aime*); wins over "
                "verl's routes."
            )
        ),
    ] = msgspec.field(default_factory=dict)
