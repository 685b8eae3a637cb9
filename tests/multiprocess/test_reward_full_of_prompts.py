"""More prompts than a client may have unfinished: they wait for each other, and none is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from sluice.client import AsyncClient, NewPrompt, RetryPolicy, RunAddress
from sluice.types import ChatMessage
from tests.support.reward_process import LISTENING, RewardProcess, reward_process
from tests.support.reward_scenarios import WAIT_S, mixed
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

NUM_PROMPTS, MOST = 60, 6


def prompts() -> list[NewPrompt]:
    """Three of four are mixed and trained; all samples of the fourth are right."""
    return [
        NewPrompt(
            f"mine-{n}",
            (ChatMessage("user", f"answer={n} right={4 if n % 4 == 0 else 2}"),),
            "math_dapo",
            str(n),
        )
        for n in range(NUM_PROMPTS)
    ]


def address_of(service: RewardProcess) -> str:
    found = [match.group(1) for line in service.log if (match := LISTENING.search(line))]
    return found[0]


async def train(service: RewardProcess, replica: ScriptedReplica, full: asyncio.Event) -> None:
    """Takes batch after batch, once the client can have no more prompts unfinished."""
    await full.wait()
    step = 0
    while True:
        await service.announce(step, [replica])
        batch = await service.take(step + 1, step)
        step += 1
        await service.acknowledge(batch, step)


@pytest.mark.parametrize(
    ("section", "limit", "named"),
    [("limits", "max_client_prompts", "a"), ("reward", "max_client_pending", "")],
)
async def test_prompts_beyond_a_limit_are_all_trained_or_filtered(
    configure: Callable[..., Path], section: str, limit: str, named: str
) -> None:
    sections: dict[str, Any] = {f"sluice__{section}__{limit}": MOST}
    config = configure(mixed(0), data__train_files=None, data__train_batch_size=1, **sections)
    replica = ScriptedReplica()
    async with scripted_replicas(replica), reward_process(config) as service:
        address = RunAddress(reward=address_of(service))
        policy = RetryPolicy(first_s=0.1, max_s=0.5, patience_s=WAIT_S)
        async with (
            AsyncClient(address, name=named, policy=policy) as client,
            asyncio.timeout(2 * WAIT_S),
            asyncio.TaskGroup() as tasks,
        ):
            full, events = asyncio.Event(), []
            training = tasks.create_task(train(service, replica, full))
            async for event in client.submit(prompts()):
                events.append(event)
                if len(events) == MOST:
                    full.set()
            training.cancel()
        status = await service.status()
    assert Counter(event.event for event in events) == {
        "accepted": NUM_PROMPTS,
        "trained": NUM_PROMPTS * 3 // 4,
        "filtered_all_right": NUM_PROMPTS // 4,
    }
    assert len({(event.prompt_id, event.event) for event in events}) == 2 * NUM_PROMPTS
    assert status.prompts_submitted == NUM_PROMPTS
    unfinished = accumulate(1 if event.event == "accepted" else -1 for event in events)
    assert max(unfinished) == MOST
