"""A reward service that dies while a batch of its is trained: no prompt twice, none left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sluice.types import DataProgress, TrainBatch
from tests.support.reward_process import RewardProcess, reward_process
from tests.support.reward_scenarios import mixed, until
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

BATCH = 8


def positions(batches: list[TrainBatch]) -> list[int]:
    return sorted(int(g.prompt_id.removeprefix("data-")) for b in batches for g in b.groups)


async def trained(
    service: RewardProcess, replica: ScriptedReplica, first_step: int, steps: int, **trainer: str
) -> list[TrainBatch]:
    """Steps of a trainer that has announced itself."""
    batches = []
    for step in range(first_step, first_step + steps):
        batches.append(await service.take(step, step - 1))
        await service.acknowledge(batches[-1], step)
        await service.announce(step, [replica], resume_from=batches[-1].progress, **trainer)
    return batches


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_the_batch_in_hand_is_not_sampled_again_when_it_is_reported_as_trained(
    configure: Callable[..., Path], max_staleness: int
) -> None:
    replica = ScriptedReplica()
    config = configure(
        mixed(64), data__shuffle=False, sluice__asynchrony__max_staleness=max_staleness
    )
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            before = await trained(service, replica, 1, 2)
            in_hand = await service.take(3, 2)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            # Still version 2, during step 3: as the trainer's announcer reports it.
            await service.announce(2, [replica], resume_from=in_hand.progress)
            await service.announce(3, [replica], resume_from=in_hand.progress)
            after = await trained(service, replica, 4, 4)
    found = positions([*before, in_hand, *after])
    assert len(set(found)) == len(found)
    # A row may move to the next batch: what was sampled before version 3 has one slot, not two.
    assert set(range(6 * BATCH)) <= set(found)


async def test_a_trainer_that_dies_in_that_step_gets_its_prompts_again_after_its_resume(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(64), data__shuffle=False)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            before = await trained(service, replica, 1, 2)
            in_hand = await service.take(3, 2)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(2, [replica], resume_from=in_hand.progress)
            # The step is never finished: another trainer resumes from the checkpoint of step 2.
            checkpoint: DataProgress = before[-1].progress
            await service.announce(2, [replica], instance_id="trainer-2", resume_from=checkpoint)
            again = await service.take(3, 2)
            await service.acknowledge(again, 3)
            await service.announce(
                3, [replica], instance_id="trainer-2", resume_from=again.progress
            )
            after = [await service.take(4, 3)]
            status = await service.status()
    assert positions([again]) == positions([in_hand])
    assert positions([*before, again, *after]) == list(range(4 * BATCH))
    assert status.statistics["reward/prompts_lost"] == 0


async def has_sampled(service: RewardProcess, batches: int) -> bool:
    """Whether so many batches are kept, and nothing else is under way."""
    status = await service.status()
    is_idle = status.groups_generating == status.groups_grading == 0
    return bool(is_idle and status.groups_kept >= batches * BATCH)


@pytest.mark.parametrize("phase", ["frozen", "acknowledged", "next batch in hand"])
async def test_a_death_during_an_overlapped_transfer_loses_and_doubles_no_prompt(
    configure: Callable[..., Path], phase: str
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(64), data__shuffle=False, sluice__asynchrony__max_staleness=2)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            batches = await trained(service, replica, 1, 1)
            batches.append(await service.take(2, 1))  # its version 2 is on its way from here on
            if phase != "frozen":
                await service.acknowledge(batches[-1], 2)
            if phase == "next batch in hand":
                batches.append(await service.take(3, 2))
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            # The replicas serve version 1 still, and have time for all that the bound admits.
            await service.announce(1, [replica], resume_from=batches[-1].progress)
            await until(partial(has_sampled, service, 1 if phase == "next batch in hand" else 2))
            if phase == "frozen":
                await service.acknowledge(batches[1], 2)
            if phase != "next batch in hand":
                batches.append(await service.take(3, 2))
            await service.announce(2, [replica], resume_from=batches[-1].progress)
            await service.acknowledge(batches[2], 3)
            await service.announce(3, [replica], resume_from=batches[-1].progress)
            batches += await trained(service, replica, 4, 5)
            await service.status()
    assert positions(batches) == list(range(8 * BATCH))  # all that there are
    for step, batch in enumerate(batches, 1):
        versions = [r.oldest_version for group in batch.groups for r in group.rollouts]
        assert all(v is not None and 0 <= step - 1 - v <= 2 for v in versions)


async def test_a_trainer_that_dies_during_an_overlapped_transfer_resumes_from_its_checkpoint(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(64), data__shuffle=False, sluice__asynchrony__max_staleness=2)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        before = await trained(service, replica, 1, 1)
        saved = await service.take(2, 1)
        await service.acknowledge(saved, 2)  # and saved, but no replica serves its version
        await service.take(3, 2)  # lost with the trainer
        resumed = {"instance_id": "trainer-2"}
        await service.announce(2, [replica], resume_from=saved.progress, **resumed)
        after = await trained(service, replica, 3, 6, **resumed)
        status = await service.status()
    assert positions([*before, saved, *after]) == list(range(8 * BATCH))  # all that there are
    assert status.statistics["reward/prompts_lost"] == 0
