"""Two thousand episodes at once, with tools that take a second and with tools that take no time:
what the engines' slots do meanwhile, and the memory of the reward service.

Reward service, environment workers and gRPC are real; replicas are scripted.
"""

# ruff: noqa: ANN401 - messages and contexts of gRPC

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts import Part
from benchmarks.reporting import print_line
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import RewardProcess, reward_process, write_config
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

TOOL_S = 1.0
_REPLICAS, _SLOTS, _SLACK, _TURN_S = 8, 160, 1.5, 12.0
"""1,280 slots, and 1,920 requests at once; episodes whose tool runs come on top."""
_GROUP, _BATCH_GROUPS, _STALENESS = 8, 64, 8
_WARM_S, _WINDOW_S, _TAKE_S = 45.0, 45.0, 120.0
_WORLD = """
import asyncio

class Slow:
    def reset(self, **row):
        pass

    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        await asyncio.sleep({tool_s})
        return "7"

    def score(self, answer):
        return 1.0
"""
_PROMPT = np.arange(200, dtype=np.uint32).tobytes()
_READ = np.arange(20, dtype=np.uint32).tobytes()
_SAMPLED = np.arange(60, dtype=np.uint32).tobytes()
_LOGPROBS = np.full(60, -0.5, np.float32).tobytes()
_LAST_OF = 4
"""Every so many-th turn, on average, calls no tool and ends its episode."""


@dataclass
class _Replica(ScriptedReplica):
    """Samples beyond its slots wait; each takes from half to one and a half of `_TURN_S`."""

    slots: int = _SLOTS
    asked: int = 0
    running: int = 0
    used_s: float = 0.0  # of all slots together, until `since`
    since: float = field(default_factory=time.monotonic)
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_SLOTS))

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Send the prompt's tokens, then each sample when its time is over."""
        before = request.prompt.continuation.token_ids_u32
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=before + _READ if before else _PROMPT, policy_version=self.version
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        async with asyncio.TaskGroup() as tasks:
            for index in request.sample_indexes:
                tasks.create_task(self._sample(index, request.sampling.seed, context))

    async def _sample(self, index: int, seed: int, context: Any) -> None:
        draws = random.Random(f"{seed}/{index}")
        self.asked += 1
        try:
            async with self.free:
                self.count(1)
                try:
                    await asyncio.sleep(_TURN_S * draws.uniform(0.5, 1.5))
                finally:
                    self.count(-1)
        finally:
            self.asked -= 1
        answer = common_pb2.Answer(content="7")
        if draws.randrange(_LAST_OF):
            answer.tool_calls.add(id="call_0", name="look", arguments_json="{}")
        rollout = common_pb2.Rollout(
            sample_index=index,
            token_ids_u32=_SAMPLED,
            behavior_logprobs_f32=_LOGPROBS,
            version_spans=[common_pb2.VersionSpan(version=self.version, start=0, end=60)],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            text="7",
            answer=answer,
        )
        await context.write(rollout_pb2.GenerateResponse(rollouts=[rollout]))

    def count(self, change: int) -> None:
        """Add what the slots have worked since the last change."""
        now = time.monotonic()
        self.used_s += self.running * (now - self.since)
        self.since = now
        self.running += change


def measure() -> Mapping[str, Any]:
    """Return the figures; about four minutes."""
    found = {}
    for tool_s in (0.0, TOOL_S):
        with tempfile.TemporaryDirectory() as folder:
            found[tool_s] = asyncio.run(_idle_and_mb(Path(folder), tool_s))
    return {
        "idle_points": found[TOOL_S][0] - found[0.0][0],
        "reward_rss_mb": max(mb for _, mb in found.values()),
    }


async def _idle_and_mb(folder: Path, tool_s: float) -> tuple[float, float]:
    """Return the share of the slots that idle, in percent, and the service's largest memory."""
    replicas = [_Replica(f"rollout-{number}") for number in range(_REPLICAS)]
    async with (
        scripted_replicas(*replicas),
        reward_process(_config(folder, tool_s), has_own_memory=True) as service,
    ):
        await service.announce(0, replicas)
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(_train(service, replicas))
            await asyncio.sleep(_WARM_S)
            began_s, before = time.monotonic(), _used_s(replicas)
            at_once, memory_mb = list[int](), list[float]()
            for _ in range(int(_WINDOW_S)):
                await asyncio.sleep(1.0)
                at_once.append(sum(replica.asked for replica in replicas))
                memory_mb.append(service.rss_mb())
            seconds, used_s = time.monotonic() - began_s, _used_s(replicas) - before
            training.cancel()
    idle = 100 * (1 - used_s / (_REPLICAS * _SLOTS * seconds))
    print_line(
        f"tools of {tool_s:g} s: slots idle {idle:.1f} %, "
        f"{min(at_once)} to {max(at_once)} samples asked for at once, "
        f"reward service {max(memory_mb):.0f} MB"
    )
    return idle, max(memory_mb)


def _used_s(replicas: Sequence[_Replica]) -> float:
    for replica in replicas:
        replica.count(0)
    return sum(replica.used_s for replica in replicas)


async def _train(service: RewardProcess, replicas: Sequence[_Replica]) -> None:
    """Take batches and announce versions, until cancelled."""
    step = 0
    while True:
        batch = await service.take(step + 1, step, _TAKE_S)
        step += 1
        await service.acknowledge(batch, step)
        await service.announce(step, replicas)


def _config(folder: Path, tool_s: float) -> Path:
    world = folder / "slow.py"
    world.write_text(_WORLD.format(tool_s=tool_s), encoding="utf-8")
    rows = prompt_rows([str(number) for number in range(10_000)])
    return write_config(
        folder / "run.yaml",
        {
            "data": {
                "train_files": str(write_prompts(folder / "train.parquet", rows)),
                "train_batch_size": _BATCH_GROUPS,
                "max_prompt_length": 1024,
                "max_response_length": 8192,
            },
            "actor_rollout_ref": {"rollout": {"n": _GROUP}},
            "trainer": {"total_epochs": 1000},
            "sluice": {
                "run_dir": str(folder / "run"),
                "asynchrony": {"max_staleness": _STALENESS},
                "environment": {"path": str(world), "workers": 2},
                "reward": {"inflight_slack": _SLACK},
            },
        },
    )


PART = Part(lambda _: measure(), most={"idle_points": 5.0, "reward_rss_mb": 400.0})
