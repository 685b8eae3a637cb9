"""`reward.*`: scorers, reward manager, reward model, custom reward functions."""

from __future__ import annotations

from typing import Literal

import msgspec

from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RewardModelConfig(Section, frozen=True):
    """A server with OpenAI's chat completions, its question, and how its reply is read."""

    enable: bool = False
    """Grade with a model; sluice starts no server for it."""

    base_url: str | None = None
    """Address of the server up to chat/completions, usually ending in /v1."""

    model_path: str | None = None
    """Name of the model, as its server knows it."""

    prompt_template: str | None = None
    """The question, with {question}, {response}, {ground_truth}, {data_source} and
    {extra_info.KEY}; none: asks for a number from 0 to 1.
    """

    score_pattern: str | None = None
    """Regular expression of the score, its last match; none: any number."""

    min_score: float = 0.0
    """Lower scores are refused."""

    max_score: float = 1.0
    """Higher scores are refused."""

    max_tokens: PositiveInt = 512
    """Longest reply, tokens."""

    request_timeout_s: PositiveFloat = 8.0
    """Seconds one request may take."""

    max_attempts: PositiveInt = 3
    """Requests for one response."""

    api_key_env: str | None = None
    """Environment variable with the server's key."""


class RewardManagerConfig(Section, frozen=True):
    """How a score becomes a reward."""

    name: Literal["naive", "dapo", "gdpo"] = "dapo"
    """naive: reward = score; dapo: overlong shaping is added; gdpo: as naive, the scorer's values
    are kept one by one.
    """


class OverlongBufferConfig(Section, frozen=True):
    """Soft punishment of responses close to the length limit (DAPO, eq. 13)."""

    enable: bool = False
    """Add the penalty to the reward."""

    len: NonNegativeInt = 0
    """Width of the zone before the limit, tokens."""

    penalty_factor: NonNegativeFloat = 0.0
    """Penalty at the limit."""

    log: bool = False
    """Report overlong and overlong_reward as metrics."""


class RewardKwargsConfig(Section, frozen=True):
    """Settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = OverlongBufferConfig()
    max_resp_len: PositiveInt | None = None
    """Length limit in the formula; none: data.max_response_length."""


class CustomRewardFunctionConfig(Section, frozen=True):
    """A scorer of the user's."""

    path: str | None = None
    """Python file that defines it; none: built-in scorers by data_source."""

    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info, **kwargs)."""

    reward_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Further keyword arguments of the function."""


class ScorerPoolConfig(Section, frozen=True):
    """Limits of the processes that run scorers."""

    num_workers: PositiveInt = 1
    """Scorer processes."""

    timeout_s: PositiveFloat = 10.0
    """Wall-clock seconds one sample may take before its process is killed."""

    memory_mb: PositiveInt = 2048
    """Address space of a scorer process, MiB."""

    max_response_chars: PositiveInt = 200_000
    """Only this many last characters of a response are graded."""


class RewardConfig(Section, frozen=True):
    """Grading."""

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_kwargs: RewardKwargsConfig = RewardKwargsConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    scorer_pool: ScorerPoolConfig = ScorerPoolConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    scorer_routes: dict[str, str] = msgspec.field(default_factory=dict)
    """Built-in scorer of a data source, or of all that begin alike (aime*); wins over verl's
    routes.
    """
