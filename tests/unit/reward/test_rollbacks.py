"""A version with the weights of an earlier one: what was sampled in between is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from services.reward.app import RewardApp, RunFiles
from services.reward.episodes.leases import LeaseManager
from services.reward.generation.request import GroupRequest
from services.reward.ledger.leases import PostedEnd
from services.reward.ledger.ledger import PromptLedger
from sluice.config.run import RunConfig
from sluice.types import ChatMessage, TrainBatch
from tests.support.reward_app import (
    ScriptedClient,
    publish,
    replica,
    running_app,
    settled,
    submit,
    train,
)

MIXED = "answer=1 right=1"
TOKENS_PER_SAMPLE = 8


TREE: dict[str, Any] = {
    "data": {"train_batch_size": 2},
    "actor_rollout_ref": {"rollout": {"n": 2}},
    "algorithm": {"filter_groups": {"enable": True}},
    "sluice": {"asynchrony": {"max_staleness": 2}},
}


def config() -> RunConfig:
    return msgspec.convert(TREE, RunConfig)


async def roll_back(app: RewardApp, client: ScriptedClient, version: int, restored: int) -> None:
    client.versions["a"] = version
    await app.loop.announce("trainer", version, [replica("a", version)], None, restored)


def ids(batch: TrainBatch) -> list[str]:
    return [group.prompt_id for group in batch.groups]


def oldest_version(batch: TrainBatch) -> int:
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    return min(one.oldest_version for one in rollouts if one.oldest_version is not None)


def ended(app: RewardApp) -> dict[str, int]:
    return {end.value: count for end, count in app.ledger.by_end.items() if count}


async def test_kept_and_running_groups_start_again_as_rolled_back_and_no_prompt_is_lost() -> None:
    gate = asyncio.Event()

    async def wait(_name: str, request: GroupRequest, index: int) -> None:
        if request.prompt.prompt_id in {"p4", "p5"} and index:
            await gate.wait()

    client = ScriptedClient(before_sample=wait)
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 6)
        await publish(app, client, 0)
        assert ids(await train(app, client, 1)) == ["p0", "p1"]
        await settled(lambda: app.groups.num_kept == 2 and app.groups.num_in_flight == 2)
        await roll_back(app, client, 2, 0)
        gate.set()
        assert sorted(client.cancelled) == ["p4", "p5"]
        totals = app.statistics()
        # Two whole groups, and of the running ones the samples that had come.
        assert totals["reward/tokens/rolled_back"] >= 2 * 2 * TOKENS_PER_SAMPLE
        assert totals["reward/rollbacks"] == 1
        later = [await train(app, client, step) for step in (3, 4)]
        assert sorted(ids(later[0]) + ids(later[1])) == ["p2", "p3", "p4", "p5"]
        assert min(map(oldest_version, later)) >= 2
        assert ended(app) == {"trained": 6}
        assert app.statistics()["reward/prompts_lost"] == 0


async def test_a_batch_that_was_leased_and_never_trained_starts_again() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        leased = await app.loop.batches.take(1, 0, 60)  # the trainer gave the wait up
        await roll_back(app, client, 1, 0)
        assert ended(app) == {}
        again = await train(app, client, 2)
        assert sorted(ids(again)) == sorted(ids(leased))
        assert oldest_version(again) == 1


async def test_a_repeated_announcement_of_a_rollback_drops_nothing_more() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await roll_back(app, client, 1, 0)
        await settled(lambda: app.groups.num_kept == 2)
        dropped = app.statistics()["reward/tokens/rolled_back"]
        await roll_back(app, client, 1, 0)
        assert app.groups.num_kept == 2
        assert app.statistics()["reward/tokens/rolled_back"] == dropped


@asynccontextmanager
async def leasing(
    file: Path, client: ScriptedClient
) -> AsyncIterator[tuple[RewardApp, LeaseManager]]:
    """One life of a service whose samples programs lease."""
    own = {**TREE["sluice"], "environment": {"agents": True}}
    settings = msgspec.convert({**TREE, "sluice": own}, RunConfig)
    with PromptLedger(file) as ledger:
        desk = LeaseManager(ledger.leases)
        async with running_app(settings, client, None, RunFiles(ledger=ledger), desk) as app:
            yield app, desk


async def play(desk: LeaseManager, *, is_whole: bool) -> None:
    """Let a program play every sample; a group that is not whole waits for one end."""
    await settled(lambda: desk.num_offered == 4)
    async with desk.leasing(4, 5.0) as leases:
        pass
    for number, lease in enumerate(leases):
        await desk.chat(lease.lease_id, "digest", (ChatMessage("user", MIXED),), (), 1)
        if number or is_whole:
            desk.end(lease.lease_id, PostedEnd(float(lease.task.sample_index)))


async def test_a_restarted_service_continues_no_leased_sample_of_a_policy_that_was_given_up(
    tmp_path: Path,
) -> None:
    file, client = tmp_path / "ledger.sqlite", ScriptedClient()
    async with leasing(file, client) as (app, desk):
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await play(desk, is_whole=True)
        await settled(lambda: app.groups.num_kept == 2)
        await roll_back(app, client, 1, 0)
    async with leasing(file, client) as (app, desk):
        await publish(app, client, 1)
        await play(desk, is_whole=True)
        assert oldest_version(await app.loop.batches.take(2, 1, 60)) == 1


async def test_a_rollback_revokes_the_leases_that_an_earlier_service_left(tmp_path: Path) -> None:
    file, client = tmp_path / "ledger.sqlite", ScriptedClient()
    async with leasing(file, client) as (app, desk):
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await play(desk, is_whole=False)
    async with leasing(file, client) as (app, desk):
        assert desk.num_leased == 4
        await roll_back(app, client, 1, 0)
        await play(desk, is_whole=True)
        assert oldest_version(await app.loop.batches.take(2, 1, 60)) == 1


def test_the_ledger_remembers_rollbacks_until_a_trainer_begins_before_them(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with PromptLedger(file) as ledger:
        ledger.begin_trainer("t", 0)
        ledger.note_rollback(4, 1)
        ledger.note_rollback(9, 6)
    with PromptLedger(file) as ledger:
        assert (ledger.num_rollbacks, ledger.is_rolled_back(4)) == (2, True)
        ledger.begin_trainer("another", 5)
    with PromptLedger(file) as ledger:
        assert ledger.num_rollbacks == 1
        assert not ledger.is_rolled_back(9)
