"""A reward service that dies in the middle of a run and is started again by its supervisor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from tests.support.reward_process import RewardProcess, reward_process
from tests.support.reward_scenarios import identity, mixed
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas


def positions(batch_ids: list[str]) -> list[int]:
    return [int(name.removeprefix("data-")) for name in batch_ids]


class Trainer:
    """Takes batches and reports its data progress with every announcement, twice."""

    def __init__(self, replica: ScriptedReplica) -> None:
        self.replica, self.version = replica, 0
        self.progress = None
        self.trained: list[str] = []

    async def announce(self, service: RewardProcess) -> None:
        for _ in range(2):
            await service.announce(self.version, [self.replica], resume_from=self.progress)

    async def step(self, service: RewardProcess) -> None:
        batch = await service.take(self.version + 1, self.version)
        await service.acknowledge(batch, self.version + 1)
        self.trained += [group.prompt_id for group in batch.groups]
        self.version, self.progress = self.version + 1, batch.progress
        await self.announce(service)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_restarted_service_continues_where_the_trainer_says_the_data_set_stands(
    configure: Callable[..., Path], max_staleness: int
) -> None:
    replica = ScriptedReplica()
    config = configure(
        mixed(64), data__shuffle=False, sluice__asynchrony__max_staleness=max_staleness
    )
    trainer = Trainer(replica)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await trainer.announce(service)
            for _ in range(3):
                await trainer.step(service)
            lost = await service.take(4, 3)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.awaited(4, 3, "announcing a policy")
            await trainer.announce(service)
            again = await service.take(4, 3)
            with pytest.raises(grpc.aio.AioRpcError, match="is not leased"):
                await service.acknowledge(lost, 4)
            for _ in range(3):
                await trainer.step(service)
            status = await service.status()
    assert len(set(trainer.trained)) == len(trainer.trained) == 6 * 8
    if max_staleness == 0:
        assert identity(again) == identity(lost)
        assert sorted(positions(trainer.trained)) == list(range(6 * 8))
    assert status.statistics["reward/groups_acknowledged"] == 6 * 8
    assert status.statistics["reward/prompts_lost"] == 0
