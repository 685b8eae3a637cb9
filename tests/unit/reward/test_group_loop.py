"""The group loop: admission, staleness, take-over, one end for every prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.group_table import CancelReason, EventKind, GroupEvent, GroupState
from services.reward.groups.loop import TAKE_OVER_TIMEOUT_S
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import BatchUnfillableError, DeadlineError, EngineError
from sluice.rpc.policy import CALL_POLICIES
from sluice.types import DataProgress, Failed, FailureKind, PromptEnd
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_app,
    settled,
    submit,
)

MIXED = "answer=1 right=1"
WRONG = "answer=1 right=0"


def config(**asynchrony: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 2}},
        "algorithm": {"filter_groups": {"enable": True, "min_yield_groups": 5}},
        "sluice": {
            "asynchrony": {"max_staleness": 1, **asynchrony},
            "reward": {"max_attempts": 1},
        },
    }
    return msgspec.convert(tree, RunConfig)


def ends(app: RewardApp) -> dict[str, int]:
    accounts = app.ledger
    assert accounts.num_submitted == sum(accounts.by_end.values()) + accounts.num_pending
    return {end.value: count for end, count in accounts.by_end.items() if count}


async def turns(count: int) -> None:
    """Let every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


class Gate:
    """Holds the samples of chosen prompts back."""

    def __init__(self, *held: str) -> None:
        self.held = set(held)
        self.opened = asyncio.Event()

    async def __call__(self, _name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id in self.held:
            await self.opened.wait()


async def publish(app: RewardApp, client: ScriptedClient, version: int) -> None:
    client.versions["a"] = version
    await app.loop.announce("trainer", version, [replica("a", version)], None)


async def test_at_staleness_zero_nothing_starts_beyond_what_the_batch_needs() -> None:
    client = ScriptedClient()
    async with running_app(config(max_staleness=0), client) as app:
        submit(app, [MIXED, WRONG, MIXED, MIXED, MIXED])
        await publish(app, client, 0)
        batch = await app.loop.batches.take(1, 0, 60)
        assert [g.prompt_id for g in batch.groups] == ["p0", "p2"]
        app.loop.batches.acknowledge(batch.batch_id, 1)
        await turns(50)
        assert len(client.calls) == 3
        await publish(app, client, 1)
        batch = await app.loop.batches.take(2, 1, 60)
        assert [g.prompt_id for g in batch.groups] == ["p3", "p4"]
        assert batch.statistics["train/staleness_max"] == 0


async def test_an_observers_error_at_the_end_of_a_cancelled_group_ends_the_service() -> None:
    client = ScriptedClient(before_sample=Gate("p0"))

    def fail(event: GroupEvent) -> None:
        if event.kind is EventKind.REQUEUED:
            raise ZeroDivisionError("a defect of an observer")

    async def run() -> None:
        async with running_app(config(), client) as app:
            app.groups.observe(fail)
            submit(app, [MIXED])
            await publish(app, client, 0)
            await settled(lambda: app.groups.counts["generating"] == 1)
            app.groups["p0"].cancel(CancelReason.PREEMPTED)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await run()
    assert failure.group_contains(ZeroDivisionError, match="a defect of an observer")


async def test_a_group_that_is_cancelled_before_its_task_begins_starts_again() -> None:
    client = ScriptedClient()

    def cancel_once(event: GroupEvent) -> None:
        if event.kind is EventKind.ADMITTED:
            asyncio.get_running_loop().call_soon(cancel)

    def cancel() -> None:
        group = app.groups["p0"]
        if not cancelled and group.task is not None:
            cancelled.append(group.is_running)
            group.cancel(CancelReason.NO_SLOT)

    cancelled: list[bool] = []
    async with running_app(config(), client) as app:
        app.groups.observe(cancel_once)
        submit(app, [MIXED, MIXED])
        await publish(app, client, 0)
        await app.loop.batches.take(1, 0, 60)
        assert cancelled == [False]
        assert app.statistics()["reward/groups_restarted"] == 1
        assert app.statistics()["reward/prompts_lost"] == 0


async def test_waiting_holds_a_batch_back_for_a_group_that_would_grow_stale() -> None:
    gate = Gate("p0")
    client = ScriptedClient(before_sample=gate)
    async with running_app(config(on_stale="wait"), client) as app:
        submit(app, [MIXED] * 4)
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 3)
        first = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(first.batch_id, 1)
        await publish(app, client, 1)
        submit(app, [MIXED] * 3, first=4)
        with pytest.raises(DeadlineError):
            await app.loop.batches.take(2, 1, 0.05)
        gate.opened.set()
        second = await app.loop.batches.take(2, 1, 60)
        assert {g.prompt_id for g in second.groups} == {"p0", "p3"}
        assert ends(app) == {"trained": 2}


async def test_dropping_cancels_groups_that_are_too_old_and_drops_kept_ones() -> None:
    gate = Gate("p0")
    client = ScriptedClient(before_sample=gate)
    async with running_app(config(on_stale="drop"), client) as app:
        session = submit(app, [MIXED] * 4)
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 3)
        await publish(app, client, 2)
        submit(app, [MIXED] * 2, first=4)
        batch = await app.loop.batches.take(3, 2, 60)
        await settled(lambda: "p0" in client.cancelled)
        await settled(lambda: ends(app) == {"dropped_stale": 4})
        assert [g.prompt_id for g in batch.groups] == ["p4", "p5"]
        assert batch.statistics["train/surplus_discarded"] == 3
        assert session.num_open == 0


async def test_a_lease_is_formed_again_for_a_newer_version() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 8)
        await publish(app, client, 0)
        old = await app.loop.batches.take(1, 0, 60)
        await publish(app, client, 1)
        new = await app.loop.batches.take(2, 1, 60)
        assert old.batch_id != new.batch_id
        assert {g.prompt_id for g in new.groups} == {g.prompt_id for g in old.groups}
        assert new.policy_version == 1
        assert ends(app) == {}


async def test_another_trainer_restarts_what_is_under_way() -> None:
    gate = Gate("p1", "p3")
    client = ScriptedClient(before_sample=gate)
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 4)
        await publish(app, client, 5)
        await app.loop.batches.take(6, 5, 60)
        gate.held = set()
        client.versions["a"] = 3
        await app.loop.announce("another", 3, [replica("a", 3)], None)
        assert sorted(client.cancelled) == ["p1", "p3"]
        batch = await app.loop.batches.take(4, 3, 60)
        assert [g.prompt_id for g in batch.groups] == ["p0", "p1"]
        assert all(r.oldest_version == 3 for g in batch.groups for r in g.rollouts)
        assert app.ledger.num_submitted == 4


def test_a_trainer_waits_longer_for_its_take_over_than_the_service_for_what_it_cancels() -> None:
    announced = CALL_POLICIES["RewardService/AnnouncePolicy"]
    assert announced.deadline_s >= 2 * TAKE_OVER_TIMEOUT_S


async def test_hopeless_yield_is_reported_with_the_last_failure() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [WRONG] * 5)
        await publish(app, client, 0)
        with pytest.raises(BatchUnfillableError, match="5 filtered_all_wrong"):
            await app.loop.batches.take(1, 0, 60)
        assert ends(app) == {"filtered_all_wrong": 5}


async def test_a_take_that_ends_names_what_is_generating() -> None:
    client = ScriptedClient(before_sample=Gate("p0", "p1"))
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        with pytest.raises(DeadlineError, match=r"generating 2 groups \(0 of 2 groups kept\)"):
            await app.loop.batches.take(1, 0, 0.05)


async def test_a_defect_in_one_group_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(InlineScorer, "score", explode)

    async def run_until_it_fails() -> None:
        client = ScriptedClient()
        async with running_app(config(), client) as app:
            submit(app, [MIXED])
            await publish(app, client, 0)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as error:
        await asyncio.wait_for(run_until_it_fails(), 60)
    assert error.group_contains(ZeroDivisionError)


async def fail_p0(_name: str, request: GroupRequest, _index: int) -> None:
    if request.prompt.prompt_id == "p0":
        raise EngineError("the engine is on fire")  # names nobody


async def test_a_failed_prompt_is_logged_with_its_replica_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient(before_sample=fail_p0)
    async with running_app(config(), client) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        await settled(lambda: ends(app) == {"dropped_failed": 1})
    line = next(line for line in caplog.messages if "dropped" in line)
    assert line.startswith("prompt p0 dropped as failed (replica a): ")
    assert "on fire" in line


async def test_a_stale_prompt_is_logged_with_its_replica_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ScriptedClient(before_sample=Gate("p0"))
    async with running_app(config(on_stale="drop"), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await settled(lambda: app.groups.num_kept == 1)
        await publish(app, client, 2)
        with pytest.raises(DeadlineError):
            await app.loop.batches.take(3, 2, 0.05)
        await settled(lambda: ends(app) == {"dropped_stale": 2})
    assert sorted(line for line in caplog.messages if "dropped" in line) == [
        "prompt p0 dropped as stale (replica a): its oldest token is of version 0, "
        "too old to be trained",
        "prompt p1 dropped as stale (replica a): oldest token of version 0, batch of 2",
    ]


async def test_a_sample_without_a_score_is_logged_with_its_prompt_and_replica(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Failed(FailureKind.SCORER_CRASH, "exit code 3")

    async def crash(_self: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Failed, ...]:
        return (lost,) * len(items)

    monkeypatch.setattr(InlineScorer, "score", crash)
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        await settled(lambda: ends(app) == {"dropped_failed": 1})
    failure = "prompt p0 (replica a): scorer_crash: exit code 3"
    assert [line for line in caplog.messages if "scorer_crash" in line] == [failure]


async def test_progress_reported_again_by_the_same_trainer_changes_nothing() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        for version in (0, 0, 1):
            client.versions["a"] = version
            fleet = [replica("a", version)]
            await app.loop.announce("trainer", version, fleet, DataProgress(7 * version))
            await settled(lambda: app.groups.num_kept == 2)
            assert app.ledger.progress() == DataProgress(0)
        assert len(client.calls) == 2
        assert client.cancelled == []


async def test_at_shutdown_streams_are_cancelled_and_prompts_stay_pending() -> None:
    client = ScriptedClient(before_sample=Gate("p0", "p1"))
    async with running_app(config(), client) as app:
        submit(app, [MIXED] * 2)
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) == 2)
        assert app.groups.counts[GroupState.GENERATING] == 2
    assert sorted(client.cancelled) == ["p0", "p1"]
    assert app.ledger.num_pending == 2
    assert app.ledger.by_end[PromptEnd.DROPPED_FAILED] == 0


async def test_places_are_counted_from_the_announced_version_while_a_later_one_is_on_its_way() -> (
    None
):
    client = ScriptedClient()
    async with running_app(config(max_staleness=2), client) as app:
        submit(app, [MIXED] * 20)
        await publish(app, client, 0)
        first = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(first.batch_id, 1)
        second = await app.loop.batches.take(2, 1, 60)  # version 0 serves still
        app.loop.batches.acknowledge(second.batch_id, 2)
        await turns(200)
        # The batches of versions 0, 1 and 2 are all that groups of version 0 have.
        assert len(client.calls) == 3 * 2
        await publish(app, client, 1)
        await settled(lambda: len(client.calls) == 4 * 2)
        third = await app.loop.batches.take(3, 2, 60)
        assert third.statistics["train/staleness_max"] == 2
        assert [g.prompt_id for g in third.groups] == ["p4", "p5"]
        await turns(200)
        assert len(client.calls) == 4 * 2
    assert "dropped_stale" not in ends(app)
