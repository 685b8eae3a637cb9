"""What counts as progress: failures far apart end no call that made progress in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest

from sluice.client import (
    AsyncClient,
    GenerateOptions,
    GenerationStarted,
    NewPrompt,
    PromptEvent,
    RetryPolicy,
    RunAddress,
    SampleFinished,
    Sampling,
    generation,
)
from sluice.client.fleet import ClientFleet, FleetReplica
from sluice.client.submission import OpenPrompts
from sluice.errors import InvalidRequestError, PeerError
from sluice.rpc.retries import Retries
from sluice.types import ChatMessage
from tests.support.clock import Clock
from tests.support.token_replica import TokenReplica, token_replicas

WINDOW = 1024
GONE = PeerError("reward", "scoring", "gone")


def prompt(number: int) -> NewPrompt:
    return NewPrompt(str(number), (ChatMessage("user", "2 + 2?"),), "math_dapo", "4")


async def test_a_call_that_was_taken_up_for_long_is_no_failure_in_a_row() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), clock=clock)
    await retries.wait_after(GONE)
    clock.now_s = 1.0
    retries.note_accepted()
    clock.now_s = 3600.0
    await retries.wait_after(GONE)


async def test_a_call_that_breaks_as_soon_as_it_is_taken_up_is_one() -> None:
    clock = Clock()
    retries = Retries(RetryPolicy(first_s=0.0, patience_s=10.0), clock=clock)
    for clock.now_s in range(10):
        retries.note_accepted()
        await retries.wait_after(GONE)
    clock.now_s = 10.0
    retries.note_accepted()
    with pytest.raises(PeerError, match="gone"):
        await retries.wait_after(GONE)


async def test_tokens_of_samples_that_come_whole_count_as_progress() -> None:
    # One token a call: the failures together last longer than the patience, none of them does.
    replica = TokenReplica(breaks_after=1, length=12)
    policy = RetryPolicy(first_s=0.1, max_s=0.1, patience_s=0.2)
    async with (
        token_replicas(replica) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=policy) as client,
    ):
        found = await client.generate("text", GenerateOptions(sampling=Sampling(seed=1)))
    assert found.rollouts[0].num_tokens == 12
    assert len(replica.requests) == 12


class CountedLookup:
    def __init__(self, failures: int = 0) -> None:
        self.looks, self.failures = 0, failures

    async def __call__(self) -> Sequence[FleetReplica]:
        self.looks += 1
        await asyncio.sleep(0.01)
        if self.looks <= self.failures:
            raise PeerError("trainer", "asking", "gone")
        return [FleetReplica("a", 8, 0)]


async def test_many_requests_at_once_ask_for_the_fleet_once() -> None:
    lookup = CountedLookup()
    fleet = ClientFleet(lookup)
    async with asyncio.TaskGroup() as tasks:
        chosen = [tasks.create_task(fleet.choose()) for _ in range(50)]
    assert {task.result().address for task in chosen} == {"a"}
    assert lookup.looks == 1


async def test_a_failure_to_ask_is_that_of_all_who_waited_and_of_nobody_later() -> None:
    lookup = CountedLookup(failures=1)
    fleet = ClientFleet(lookup)
    failures: list[PeerError] = []

    async def ask() -> None:
        try:
            await fleet.choose()
        except PeerError as error:
            failures.append(error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(ask())
    assert len(failures) == 20
    assert lookup.looks == 1
    assert (await fleet.choose()).address == "a"


async def test_a_replica_is_not_avoided_for_a_mistake_of_the_caller() -> None:
    first = TokenReplica(breaks_after=0, code=grpc.StatusCode.INVALID_ARGUMENT)
    second = TokenReplica(slots_busy=2)
    async with (
        token_replicas(first, second) as addresses,
        AsyncClient(RunAddress(replicas=addresses)) as client,
    ):
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await client.generate("text")
    assert len(first.requests) == 2


async def test_a_call_that_has_failed_takes_no_prompt_from_the_next() -> None:
    under_way = OpenPrompts(map(prompt, range(1030)), until_outcome=True)
    dead = under_way.requests()
    for _ in range(WINDOW):
        await anext(dead)
    async with asyncio.TaskGroup() as tasks:
        sampled = tasks.create_task(anext(dead, None))  # gRPC still waits for the dead call's next
        await asyncio.sleep(0)
        alive = under_way.requests()
        again = [(await anext(alive)).prompt_id for _ in range(WINDOW)]
        under_way.new_events(PromptEvent("0", "trained", 1, (), ""))
        fresh = await anext(alive)
    assert sampled.result() is None
    assert again == [str(n) for n in range(WINDOW)]
    assert fresh.prompt_id == "1024"


async def until_cancelled(replica: TokenReplica) -> None:
    async with asyncio.timeout(60):
        await replica.cancelled.wait()


def only_stalls_after(monkeypatch: pytest.MonkeyPatch, hung: TokenReplica, messages: int) -> None:
    """Let no stream stall but that of `hung`, and that one only after so many messages."""
    moving = generation._until_stalled

    async def patient(
        stream: AsyncGenerator[Any, None], address: str, stall_s: float
    ) -> AsyncGenerator[Any, None]:
        for _ in range(messages if address == hung.address else 0):
            yield await anext(stream)
        last_s = stall_s if address == hung.address else 600.0
        async with aclosing(moving(stream, address, last_s)) as rest:
            async for message in rest:
                yield message

    monkeypatch.setattr(generation, "_until_stalled", patient)


@pytest.mark.parametrize("every_token", [False, True])
async def test_a_replica_whose_engine_hangs_is_left_for_another_one(
    monkeypatch: pytest.MonkeyPatch, every_token: bool
) -> None:
    hung, sound = TokenReplica(hangs_after=2), TokenReplica(slots_busy=3)
    only_stalls_after(monkeypatch, hung, 3)  # it has accepted, and sent both tokens
    policy = RetryPolicy(first_s=0.01, stall_s=0.2)
    async with (
        token_replicas(hung, sound) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=policy) as client,
    ):
        stream = client.stream("text", every_token=every_token)
        events = [event async for event in stream]
        await until_cancelled(hung)
    finished = events[-1]
    assert isinstance(finished, SampleFinished)
    assert finished.rollout.num_tokens == 6
    (rest,) = sound.requests
    assert len(rest.partials) == 1  # known tokens are not generated again
    starts = [event for event in events if isinstance(event, GenerationStarted)]
    assert "neither tokens nor a sign of life for 0.2 s" in starts[-1].moved_because


@pytest.mark.usefixtures("waits_take_no_time")
async def test_signs_of_life_keep_a_stream_that_waits_longer_than_it_may_be_silent() -> None:
    async def signs() -> AsyncGenerator[Any, None]:
        for number in range(6):
            await asyncio.sleep(0.5)
            yield number

    moving = generation._until_stalled(cast("Any", signs()), "replica", 2.5)
    assert [message async for message in moving] == list(range(6))


async def test_a_replica_that_is_busy_with_other_samples_is_waited_for() -> None:
    busy = TokenReplica(signs=6)
    policy = RetryPolicy(first_s=0.01, patience_s=0.0)
    async with (
        token_replicas(busy) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=policy) as client,
    ):
        found = await client.generate("text")
    assert found.rollouts[0].num_tokens == 6
    assert len(busy.requests) == 1


async def test_a_fleet_that_hangs_altogether_ends_the_call_after_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hung = TokenReplica(hangs_after=0)
    only_stalls_after(monkeypatch, hung, 1)  # it has accepted
    policy = RetryPolicy(first_s=0.01, stall_s=0.1, patience_s=0.1)
    async with (
        token_replicas(hung) as addresses,
        AsyncClient(RunAddress(replicas=addresses), policy=policy) as client,
        asyncio.timeout(60),
    ):
        with pytest.raises(PeerError, match="neither tokens nor a sign of life"):
            await client.generate("text")
    assert len(hung.requests) == 2
