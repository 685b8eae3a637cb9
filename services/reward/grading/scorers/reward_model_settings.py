"""Settings of a reward model behind HTTP."""

from __future__ import annotations

import msgspec

from sluice.config.schema.reward import RewardModelConfig
from sluice.errors import ConfigError

KEY = "reward.reward_model"
DEFAULT_TEMPLATE = (
    "Grade the response against the reference answer. Reply with one number from 0 (wrong) to 1 "
    "(right) and nothing else.\n\nQuestion:\n{question}\n\nReference answer:\n{ground_truth}\n\n"
    "Response:\n{response}\n\nGrade:"
)
LAST_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"


class RewardModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A server with OpenAI's chat completions, its question and how its reply is read.

    `base_url` ends before ``/chat/completions``, usually in ``/v1``. `prompt_template` may hold
    ``{question}``, ``{response}``, ``{ground_truth}``, ``{data_source}`` and
    ``{extra_info.KEY}``; other braces stay. Of the matches of `score_pattern` in the reply the
    last counts (its first group, if it has one); a number outside `min_score`..`max_score` is
    refused. `api_key_env` names the environment variable that holds the key.
    """

    base_url: str
    model: str
    prompt_template: str = DEFAULT_TEMPLATE
    score_pattern: str = LAST_NUMBER
    min_score: float = 0.0
    max_score: float = 1.0
    max_tokens: int = 512
    request_timeout_s: float = 8.0
    max_attempts: int = 3
    max_response_bytes: int = 2**20
    api_key_env: str | None = None


def configured_settings(config: RewardModelConfig) -> RewardModelSettings | None:
    """The settings that a run's configuration asks for; ``None``: no reward model.

    Raises:
        ConfigError: it is enabled without its address or its name.
    """
    if not config.enable:
        return None
    if not config.base_url or not config.model_path:
        missing = "base_url" if not config.base_url else "model_path"
        raise ConfigError(
            f"{KEY}.{missing} is not set although {KEY}.enable is true; set it, or turn the reward "
            "model off"
        )
    return RewardModelSettings(
        base_url=config.base_url,
        model=config.model_path,
        prompt_template=config.prompt_template or DEFAULT_TEMPLATE,
        score_pattern=config.score_pattern or LAST_NUMBER,
        min_score=config.min_score,
        max_score=config.max_score,
        max_tokens=config.max_tokens,
        request_timeout_s=config.request_timeout_s,
        max_attempts=config.max_attempts,
        api_key_env=config.api_key_env,
    )
