"""Pools of scorer processes, by what most tests choose of their configuration."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.reward.grading import pool, scorer_worker
from services.reward.grading.pool import ScorerPool
from services.reward.grading.scorer_worker import ScorerWorker
from sluice.config.schema.reward import (
    CustomRewardFunctionConfig,
    RewardConfig,
    RewardModelConfig,
    SandboxFusionConfig,
    ScorerPoolConfig,
)
from sluice.config.schema.service import SandboxConfig
from sluice.data.scoring import ScorerInput

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
    """A pool that runs; arguments of `_configured`. It has time to end what it has killed."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pool, scorer_worker):
            patch.setattr(module, "END_TIMEOUT_S", 300.0)
        async with pool.running_scorer_pool(*_configured(*parts, **more), run_dir) as running:
            yield running


_LOOK_S = 0.02


def hurry(
    patch: pytest.MonkeyPatch,
    deed: str,
    limit_s: float = 1.0,
    began: Callable[[], bool] = lambda: True,
) -> None:
    """Give the pools of this process a short limit for one response: from when it `began`.

    The others keep the pool's limit, which may then be one that no busy machine reaches.
    """
    really_score, really_left = ScorerWorker.score, ScorerWorker._time_left
    asked: dict[ScorerWorker, Sequence[ScorerInput]] = {}
    since: dict[ScorerWorker, float] = {}

    async def score(worker: ScorerWorker, items: Sequence[ScorerInput]) -> object:
        asked[worker] = items
        return await really_score(worker, items)

    def time_left(worker: ScorerWorker) -> float:
        progress = worker._progress()
        if progress is None or asked[worker][progress.item].response != deed:
            return min(_LOOK_S, really_left(worker))
        if not began():
            return min(_LOOK_S, really_left(worker))
        return since.setdefault(worker, time.monotonic()) + limit_s - time.monotonic()

    patch.setattr(ScorerWorker, "score", score)
    patch.setattr(ScorerWorker, "_time_left", time_left)
