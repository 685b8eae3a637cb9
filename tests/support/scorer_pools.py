"""Pools of scorer processes, by what most tests choose of their configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from services.reward.grading import pool
from services.reward.grading.pool import ScorerPool
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardModelConfig,
    SandboxFusionConfig,
    ScorerPoolConfig,
)
from sluice.config.schema.service import SandboxConfig

Sandboxes = tuple[SandboxConfig, SandboxFusionConfig]
NO_SANDBOXES = (SandboxConfig(), SandboxFusionConfig())


def _configured(
    limits: ScorerPoolConfig,
    custom: CustomRewardFunctionConfig,
    routes: Mapping[str, str] | None = None,
    reward_model: RewardModelConfig | None = None,
    sandboxes: Sandboxes = NO_SANDBOXES,
) -> tuple[RewardConfig, SandboxConfig]:
    """The configuration of grading; a reward model that is given is used."""
    model = RewardModelConfig()
    if reward_model is not None:
        model = msgspec.structs.replace(reward_model, enable=True)
    reward = RewardConfig(
        custom_reward_function=custom,
        scorer_pool=limits,
        scorer_routes=dict(routes or {}),
        reward_model=model,
        sandbox_fusion=sandboxes[1],
    )
    return reward, sandboxes[0]


def scorer_pool(*parts: Any, **more: Any) -> ScorerPool:
    """A pool that does not run; arguments of `_configured`."""
    return ScorerPool(*_configured(*parts, **more))


@asynccontextmanager
async def running_scorer_pool(
    *parts: Any, run_dir: Path | None = None, **more: Any
) -> AsyncIterator[ScorerPool]:
    """A pool that runs; arguments of `_configured`."""
    async with pool.running_scorer_pool(*_configured(*parts, **more), run_dir) as running:
        yield running
