"""What the reward service's watchdog sees of groups that are generated and graded."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.group_table import GroupTable
from services.reward.metrics import work_state
from sluice.config.loading.loader import load_config
from tests.support.reward_app import ScriptedClient, replica, running_app, settled, submit

SETTINGS = ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=2")


async def test_groups_that_replicas_generate_are_work_that_moves_with_every_sample() -> None:
    released = [asyncio.Event(), asyncio.Event()]

    async def before(_name: str, _request: GroupRequest, index: int) -> None:
        await released[index].wait()

    client = ScriptedClient(before_sample=before)
    async with running_app(load_config(None, SETTINGS), client) as app:
        work = partial(work_state, app, patience_s=600.0)
        assert not work().has_work
        submit(app, ["answer=1 right=1"])
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        await settled(lambda: bool(client.calls))
        before_sample = work()
        assert before_sample.has_work
        assert before_sample.patience_s == 600.0
        assert work().progress == before_sample.progress
        assert ("rollout fleet", 1) in [(wait.peer, wait.count) for wait in work().waits]
        released[0].set()
        await settled(lambda: work().progress != before_sample.progress)
        released[1].set()
        await settled(lambda: not work().has_work)


async def test_groups_whose_replicas_have_left_are_no_work_of_the_service() -> None:
    async def never(_name: str, _request: GroupRequest, _index: int) -> None:
        await asyncio.Event().wait()

    client = ScriptedClient(before_sample=never)
    async with running_app(load_config(None, SETTINGS), client) as app:
        work = partial(work_state, app, patience_s=600.0)
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        submit(app, ["answer=1 right=1"])
        await settled(lambda: bool(client.calls))
        assert work().has_work
        await app.loop.announce("trainer-1", 0, [], None)
        assert not work().has_work
        assert app.groups.counts["generating"] == 1
        assert "rollout fleet" in {wait.peer for wait in work().waits}


async def test_what_the_watchdog_asks_every_second_does_not_count_all_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_app(load_config(None, SETTINGS), ScriptedClient()) as app:
        work = partial(work_state, app, patience_s=600.0)
        before = work()
        await app.loop.announce("trainer-1", 0, [replica("a")], None)
        monkeypatch.setattr(RewardApp, "statistics", None)
        for walk in ("__iter__", "in_state", "in_order"):
            monkeypatch.setattr(GroupTable, walk, None)
        submit(app, ["answer=1 right=1"])
        await settled(lambda: work().progress != before.progress)
        await settled(lambda: app.groups.num_kept == 1)
        assert app.counters.progress == (0, 2, 16)
