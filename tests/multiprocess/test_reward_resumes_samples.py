"""A killed reward service is started again and goes on from the tokens that it had received."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.accounting import TokensAcrossRestarts
from sluice.types import DataProgress
from tests.support.growing_replica import GrowingReplica
from tests.support.reward_process import RewardProcess, reward_process
from tests.support.reward_scenarios import SAMPLES, mixed, until
from tests.support.scripted_rollout import scripted_replicas

GROUPS = 8
PART = GROUPS * SAMPLES * 10
WHOLE = GROUPS * SAMPLES * 16


async def saved(service: RewardProcess, num_tokens: int) -> bool:
    """Whether the ledger was told of so many tokens."""
    return bool((await service.status()).statistics["reward/saved_tokens"] >= num_tokens)


async def kill(service: RewardProcess, version: int, replica: GrowingReplica) -> None:
    await service.announce(version, [replica])  # answered once the disk has what was noted
    service.process.kill()
    await service.wait()
    await until(lambda: replica.num_open == 0)  # a call of the dead must not go on with the next's


def tokens_of(status: Any) -> dict[str, float]:
    """The token accounts of one service, which must balance."""
    found = {
        name.removeprefix("reward/tokens/"): count
        for name, count in status.statistics.items()
        if name.startswith("reward/tokens/")
    }
    assert sum(found.values()) == 2 * found["received"]
    return found


def settings(configure: Callable[..., Path], **further: Any) -> Path:
    return configure(
        mixed(GROUPS),
        data__shuffle=False,
        sluice__reward__ledger_samples_interval_s=0.1,
        sluice__asynchrony__max_staleness=1,
        **further,
    )


async def test_samples_of_a_killed_service_continue_from_their_tokens_and_the_books_balance(
    configure: Callable[..., Path],
) -> None:
    replica, config, accounting = GrowingReplica(), settings(configure), TokensAcrossRestarts()
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            await until(lambda: saved(service, PART))
            accounting.update(dict((await service.status()).statistics))
            await kill(service, 0, replica)
        assert (replica.num_sent, replica.partials.total()) == (PART, 0)
        replica.may_end.set()
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            batch = await service.take(1, 0)
            await service.acknowledge(batch, 1)
            status = await service.status()
            accounting.update(dict(status.statistics))
    assert replica.partials.total() == PART
    assert replica.num_sent == WHOLE
    assert all(
        rollout.token_ids.tolist() == list(range(16))
        for group in batch.groups
        for rollout in group.rollouts
    )
    assert status.statistics["reward/reused_tokens"] == PART
    tokens = tokens_of(status)
    assert (tokens["trained"], tokens["received"]) == (WHOLE, WHOLE - PART)
    by_use = accounting.by_use()
    assert by_use is not None
    assert sum(by_use.values()) == replica.num_sent
    assert (by_use["trained"], by_use["aborted"]) == (WHOLE, 0)


async def test_whole_groups_of_a_killed_service_are_graded_again_and_not_generated(
    configure: Callable[..., Path],
) -> None:
    replica, config = GrowingReplica(), settings(configure)
    replica.may_end.set()
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            lost = await service.take(1, 0)
            await until(lambda: saved(service, WHOLE))
            await kill(service, 0, replica)
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            batch = await service.take(1, 0)
            await service.acknowledge(batch, 1)
            status = await service.status()
    assert replica.num_sent == WHOLE
    assert set(replica.asked.values()) == {SAMPLES}
    assert {g.prompt_id for g in batch.groups} == {g.prompt_id for g in lost.groups}
    assert dict(status.prompts_by_end)["trained"] == GROUPS
    assert tokens_of(status)["trained"] == WHOLE


@pytest.mark.parametrize(("resumed_at", "reused"), [(1, PART), (None, 0)])
async def test_a_trainer_that_was_killed_too_goes_on_from_tokens_of_versions_it_still_has(
    configure: Callable[..., Path], resumed_at: int | None, reused: int
) -> None:
    replica, config = GrowingReplica(), settings(configure)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(1, [replica], resume_from=DataProgress(0))
            await until(lambda: saved(service, PART))
            await kill(service, 1, replica)
        replica.may_end.set()
        version, progress = resumed_at or 0, None if resumed_at is None else DataProgress(0)
        async with reward_process(config) as service:
            await service.announce(
                version, [replica], instance_id="trainer-2", resume_from=progress
            )
            batch = await service.take(version + 1, version)
            await service.acknowledge(batch, version + 1)
            status = await service.status()
    assert replica.partials.total() == status.statistics["reward/reused_tokens"] == reused
    assert dict(status.prompts_by_end)["trained"] == GROUPS
    assert tokens_of(status)["received"] == WHOLE - reused
