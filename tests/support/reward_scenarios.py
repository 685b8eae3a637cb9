"""What runs of the reward service share: configurations, prompts and a trainer's steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.types import ReplicaInfo, TrainBatch
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import RewardProcess
from tests.support.scripted_rollout import ScriptedReplica

SAMPLES = 4
WAIT_S = 240.0


def run_tree(tmp_path: Path, contents: list[str], **sections: Any) -> dict[str, Any]:
    """A configuration over a data set of `contents`; `sections` overrides by dotted key."""
    train = write_prompts(tmp_path / "train.parquet", prompt_rows(contents), row_group_size=16)
    tree: dict[str, Any] = {
        "data": {"train_files": str(train), "train_batch_size": 8},
        "actor_rollout_ref": {"rollout": {"n": SAMPLES, "max_num_seqs": 64}},
        "algorithm": {"filter_groups": {"enable": True}},
        "reward": {"scorer_pool": {"timeout_s": 60.0}},  # however long a busy machine keeps it
        "trainer": {"total_epochs": 1},
        "sluice": {
            "run_dir": str(tmp_path / "run"),
            "asynchrony": {"max_staleness": 0},
            "reward": {"stall_timeout_s": 120.0},
            "shutdown_grace_s": 120.0,
        },
    }
    for key, value in sections.items():
        section = tree
        *parents, leaf = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return tree


@dataclass
class Announced:
    """A replica that a trainer would announce."""

    info: ReplicaInfo
    version: int = 3


def mixed(count: int, first: int = 0) -> list[str]:
    """Prompts whose groups are mixed: two of four samples are right."""
    return [f"answer={first + i} right=2" for i in range(count)]


def cycling(count: int) -> list[str]:
    """Prompts with 0 to 4 right samples in turn: three of five groups are mixed."""
    return [f"answer={i} right={i % 5}" for i in range(count)]


async def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """Poll `condition`, which may be async."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


def identity(batch: TrainBatch) -> list[tuple[str, list[list[int]]]]:
    """What must repeat: prompts in order with all their tokens."""
    return [(g.prompt_id, [r.token_ids.tolist() for r in g.rollouts]) for g in batch.groups]


async def train(service: RewardProcess, replicas: list[ScriptedReplica], steps: int) -> list[Any]:
    """Take, acknowledge and publish `steps` times."""
    batches = []
    await service.announce(0, replicas)
    for step in range(1, steps + 1):
        batch = await service.take(step, step - 1)
        await service.status()
        await service.acknowledge(batch, step)
        await service.status()
        await service.announce(step, replicas)
        batches.append(batch)
    return batches
