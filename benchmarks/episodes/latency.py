"""Two thousand episodes at once, with tools that take a second and with tools that take no time:
what the engines' slots do meanwhile, and the memory of the reward service.

Reward service, environment workers and gRPC are real; replicas are scripted (`latency_peer`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerProcess
from benchmarks.reporting import print_line
from sluice.types import ReplicaInfo
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import RewardProcess, reward_process, write_config

KEYS = ("idle_points", "reward_rss_mb")
MOST: Mapping[str, float] = {"idle_points": 5.0, "reward_rss_mb": 400.0}

EPISODES, TOOL_S = 2000, 1.0
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


def measure() -> Mapping[str, Any]:
    """Return the figures; about four minutes."""
    found = {}
    for tool_s in (0.0, TOOL_S):
        with (
            tempfile.TemporaryDirectory() as folder,
            closing(PeerProcess("benchmarks.episodes.latency_peer")) as peer,
        ):
            found[tool_s] = asyncio.run(_idle_and_mb(Path(folder), peer, tool_s))
    return {
        "idle_points": found[TOOL_S][0] - found[0.0][0],
        "reward_rss_mb": max(mb for _, mb in found.values()),
    }


async def _idle_and_mb(folder: Path, peer: PeerProcess, tool_s: float) -> tuple[float, float]:
    """Return the share of the slots that idle, in percent, and the service's largest memory."""
    peer.send("start", replicas=_REPLICAS, slots=_SLOTS, turn_s=_TURN_S)
    addresses = (await asyncio.to_thread(peer.answer))["addresses"]
    replicas = [
        _Announced(ReplicaInfo(f"rollout-{number}", "one", address, _SLOTS))
        for number, address in enumerate(addresses)
    ]
    async with reward_process(_config(folder, tool_s), has_own_memory=True) as service:
        await service.announce(0, replicas)
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(_train(service, peer, replicas))
            await asyncio.sleep(_WARM_S)
            before = peer.call("counts")
            at_once, memory_mb = list[int](), list[float]()
            for _ in range(int(_WINDOW_S)):
                await asyncio.sleep(1.0)
                at_once.append(peer.call("counts")["asked"])
                memory_mb.append(service.rss_mb())
            after = peer.call("counts")
            training.cancel()
    slot_s = _REPLICAS * _SLOTS * (after["at_s"] - before["at_s"])
    idle = 100 * (1 - (after["used_s"] - before["used_s"]) / slot_s)
    rate = (after["turns"] - before["turns"]) / (after["at_s"] - before["at_s"])
    print_line(
        f"tools of {tool_s:g} s: slots idle {idle:.1f} %, {rate:.0f} turns/s, "
        f"{min(at_once)} to {max(at_once)} samples asked for at once, "
        f"reward service {max(memory_mb):.0f} MB"
    )
    return idle, max(memory_mb)


class _Announced:
    """A replica that the trainer announces."""

    def __init__(self, info: ReplicaInfo) -> None:
        self.info, self.version = info, 0


async def _train(service: RewardProcess, peer: PeerProcess, replicas: list[_Announced]) -> None:
    """Take batches and announce versions, until cancelled."""
    step = 0
    while True:
        batch = await service.take(step + 1, step, _TAKE_S)
        step += 1
        await service.acknowledge(batch, step)
        peer.call("version", version=step)
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
