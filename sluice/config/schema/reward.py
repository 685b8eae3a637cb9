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
    """A model that grades, behind an OpenAI-compatible chat server: its prompt and the parsing of
    its reply.
    """

    enable: bool = False
    """Grade with a model; you start its server, sluice does not."""

    base_url: str | None = None
    """URL of the server without chat/completions; it usually ends in /v1."""

    model_path: str | None = None
    """Name of the model on that server."""

    prompt_template: str | None = None
    """Prompt for the model, with {question}, {response}, {ground_truth}, {data_source} and
    {extra_info.KEY}; none: a prompt that requests a number from 0 to 1.
    """

    score_pattern: str | None = None
    """Regular expression of the score in the reply; the last match counts; none: any number."""

    min_score: float = 0.0
    """Lowest valid score; a response with a lower one is unscorable."""

    max_score: float = 1.0
    """Highest valid score; a response with a higher one is unscorable."""

    max_tokens: PositiveInt = 512
    """Longest reply of the model, in tokens."""

    request_timeout_s: PositiveFloat = 8.0
    """Maximum seconds for one request."""

    max_attempts: PositiveInt = 3
    """Maximum requests for one response, including the first."""

    api_key_env: str | None = None
    """Environment variable that holds the server's API key."""


class RewardManagerConfig(Section, frozen=True):
    """How a score becomes a reward."""

    name: Literal["naive", "dapo", "gdpo"] = "dapo"
    """naive: the reward is the score; dapo: the overlong penalty is added; gdpo: as naive, and the
    scorer's other values stay separate.
    """


class OverlongBufferConfig(Section, frozen=True):
    """Soft penalty for responses close to the length limit (DAPO, eq. 13)."""

    enable: bool = False
    """Add the penalty to the reward."""

    len: NonNegativeInt = 0
    """Length of the penalty zone before the limit, in tokens."""

    penalty_factor: NonNegativeFloat = 0.0
    """Penalty of a response at the limit; it grows linearly over the zone."""

    log: bool = False
    """Report the metrics overlong and overlong_reward."""


class RewardKwargsConfig(Section, frozen=True):
    """Settings of the reward manager."""

    overlong_buffer_cfg: OverlongBufferConfig = OverlongBufferConfig()
    max_resp_len: PositiveInt | None = None
    """Length limit in the overlong penalty, in tokens; none: data.max_response_length."""


class CustomRewardFunctionConfig(Section, frozen=True):
    """The user's own scorer."""

    path: str | None = None
    """Python file that defines the function; none: built-in scorers by data_source."""

    name: str = "compute_score"
    """Function name: (data_source, solution_str, ground_truth, extra_info, **kwargs)."""

    reward_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Additional keyword arguments of the function."""


class ScorerPoolConfig(Section, frozen=True):
    """The processes that run scorers, and their limits."""

    num_workers: PositiveInt = 1
    """Number of scorer processes."""

    timeout_s: PositiveFloat = 10.0
    """Seconds after which a scorer process is killed if its sample is not graded."""

    memory_mb: PositiveInt = 2048
    """Largest address space of a scorer process, MiB."""

    max_response_chars: PositiveInt = 200_000
    """Only the last this many characters of a response are graded."""


class SandboxFusionConfig(Section, frozen=True):
    """A server of SandboxFusion, which runs programs elsewhere."""

    url: str | None = None
    """URL that runs a program; it usually ends in /run_code. This server is the sandbox if
    sluice.sandbox.backend is not set.
    """

    memory_limit_mb: PositiveInt = 1024
    """Memory of a program on that server, MiB."""


class RewardConfig(Section, frozen=True):
    """Grading."""

    reward_manager: RewardManagerConfig = RewardManagerConfig()
    reward_kwargs: RewardKwargsConfig = RewardKwargsConfig()
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    scorer_pool: ScorerPoolConfig = ScorerPoolConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    scorer_routes: dict[str, str] = msgspec.field(default_factory=dict)
    """Built-in scorer of each data source; a key that ends in * covers all sources with that prefix
    (aime*). These routes override verl's.
    """
