"""A pool of scorer processes, by what most tests choose of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from services.reward.grading import pool
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardModelConfig,
    SandboxFusionConfig,
    ScorerPoolConfig,
)
from sluice.config.schema.sandbox import SandboxConfig


def running_scorer_pool(
    limits: ScorerPoolConfig,
    custom: CustomRewardFunctionConfig,
    routes: Mapping[str, str] | None = None,
    reward_model: RewardModelConfig | None = None,
    run_dir: Path | None = None,
    sandboxes: tuple[SandboxConfig, SandboxFusionConfig] | None = None,
) -> AbstractAsyncContextManager[pool.ScorerPool]:
    """A pool; a reward model that is given is used."""
    model = RewardModelConfig()
    if reward_model is not None:
        model = msgspec.structs.replace(reward_model, enable=True)
    sandbox, fusion = sandboxes or (SandboxConfig(), SandboxFusionConfig())
    reward = RewardConfig(
        custom_reward_function=custom,
        scorer_pool=limits,
        scorer_routes=dict(routes or {}),
        reward_model=model,
        sandbox_fusion=fusion,
    )
    return pool.running_scorer_pool(reward, sandbox, run_dir)
