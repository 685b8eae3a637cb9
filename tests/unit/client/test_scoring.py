"""Responses graded by a service whose scorers are fast, slow or taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.client import AsyncClient, RetryPolicy, RunAddress, ScoreItem
from sluice.errors import DeadlineError, ExhaustedError, InvalidRequestError
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from sluice.rpc.retries import Retries
from sluice.types import Failed, FailureKind, Scored
from tests.support.rpc_server import serving

QUICK = RetryPolicy(first_s=0.01, max_s=0.02)


@dataclass
class Scorers(reward_pb2_grpc.RewardServiceServicer):
    """Gives the response's number as its score, ``slow`` none; a response may be graded twice.

    Attributes:
        max_items: a call with more of them never ends.
        takes_s: seconds that any other lasts.
        waits_until: what each of the others waits for before.
        capacity: calls at once; further ones are refused.
        sizes: items of each call.
        num_cancelled: calls that were cancelled.
        num_refused: calls beyond the capacity.
        num_open, max_open: calls under way, now and at most.
    """

    max_items: int = 1000
    takes_s: float = 0.0
    waits_until: Callable[[Scorers], bool] = lambda _: True
    capacity: int = 1000
    sizes: list[int] = field(default_factory=list)
    num_cancelled: int = 0
    num_refused: int = 0
    num_open: int = 0
    max_open: int = 0
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def Score(self, request: Any, context: Any) -> Any:
        self.is_asked.set()
        if self.num_open >= self.capacity:
            self.num_refused += 1
            raise ExhaustedError("calls are running")
        self.sizes.append(len(request.items))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            if len(request.items) > self.max_items:
                await asyncio.Event().wait()
            await asyncio.sleep(self.takes_s)
            while not self.waits_until(self):
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1
        return reward_pb2.ScoreResponse(results=[_grade(item.response) for item in request.items])


def _grade(response: str) -> Any:
    if response == "slow":
        return reward_pb2.ScoreResult(failure="scorer_timeout: 10 s")
    return reward_pb2.ScoreResult(score=common_pb2.Score(score=float(response), reward=0.5))


def items(count: int) -> list[ScoreItem]:
    return [ScoreItem("math_dapo", str(number), "4") for number in range(count)]


def scores(outcomes: list[Scored | Failed]) -> list[float]:
    return [outcome.score for outcome in outcomes if isinstance(outcome, Scored)]


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with 1.5 s unless they set another deadline."""
    monkeypatch.setitem(CALL_POLICIES, "RewardService/Score", CallPolicy(deadline_s=1.5))


@asynccontextmanager
async def client_of(service: Scorers) -> AsyncIterator[AsyncClient]:
    async with (
        serving(reward=service) as server,
        AsyncClient(RunAddress(reward=server.address), policy=QUICK) as client,
        asyncio.timeout(240),
    ):
        yield client


async def test_scores_come_in_order_from_several_calls_at_once() -> None:
    service = Scorers(waits_until=lambda calls: calls.max_open == 4)
    async with client_of(service) as client:
        outcomes = await client.score([*items(300), ScoreItem("math_dapo", "slow", "4")])
        assert await client.score([]) == []
    assert scores(outcomes) == list(range(300))
    assert isinstance(outcomes[0], Scored)
    assert outcomes[0].reward == 0.5
    assert outcomes[300] == Failed(FailureKind.SCORER_TIMEOUT, "10 s")
    assert sorted(service.sizes) == [13] + [16] * 18
    assert service.max_open == 4


async def test_a_full_service_gets_fewer_calls_at_once_and_grades_all() -> None:
    service = Scorers(capacity=1, waits_until=lambda calls: calls.num_refused == 3)
    async with client_of(service) as client:
        assert scores(await client.score(items(320))) == list(range(320))
    assert service.num_refused == 3


async def test_a_service_that_is_full_of_others_calls_is_asked_again() -> None:
    service = Scorers(capacity=0)
    async with client_of(service) as client, asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(client.score(items(20)))
        while service.num_refused < 4:
            await asyncio.sleep(0.01)
        service.capacity = 1
    assert scores(scoring.result()) == list(range(20))


async def test_one_client_makes_no_more_calls_than_a_service_takes_of_it() -> None:
    service = Scorers(takes_s=0.02, capacity=16)
    async with client_of(service) as client, asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(client.score(items(128)))
    assert service.num_refused == 0
    assert len(service.sizes) == 64


@pytest.mark.usefixtures("short_calls")
async def test_a_call_has_the_whole_time_of_the_caller() -> None:
    service = Scorers(takes_s=2.0)
    async with client_of(service) as client:
        assert scores(await client.score(items(3), deadline_s=200)) == [0, 1, 2]
        service.max_items = 0
        with pytest.raises(DeadlineError, match=r"no answer within 1\.5 s while scoring"):
            await client.score(items(3))


async def test_the_callers_deadline_ends_the_scoring() -> None:
    service = Scorers(max_items=0)
    async with client_of(service) as client:
        while len(service.sizes) < 2:  # a slow machine may not bring both calls in time
            with pytest.raises(DeadlineError, match=r"no answer within 1\.5 s while scoring"):
                await client.score(items(20), deadline_s=1.5)
        while service.num_open:
            await asyncio.sleep(0.01)
    assert service.num_cancelled == len(service.sizes)


async def test_a_deadline_that_passes_over_failures_names_the_last_one(
    monkeypatch: pytest.MonkeyPatch, skip_time: Callable[[float], None]
) -> None:
    after = Retries.wait_after

    async def wait_after(*arguments: Any) -> None:
        skip_time(600.0)
        await after(*arguments)

    monkeypatch.setattr(Retries, "wait_after", wait_after)
    async with AsyncClient(RunAddress(reward="127.0.0.1:1")) as client:
        with pytest.raises(DeadlineError, match=r"last try ended with: 127\.0\.0\.1:1: failed"):
            await client.score(items(1), deadline_s=600.0)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_deadline_is_a_finite_time(deadline_s: float) -> None:
    async with AsyncClient(RunAddress(reward="127.0.0.1:1")) as client:
        with pytest.raises(InvalidRequestError, match="deadline_s"):
            await client.score(items(1), deadline_s=deadline_s)


async def test_scoring_ends_with_its_client() -> None:
    service = Scorers(max_items=0)
    async with (
        serving(reward=service) as server,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        client = AsyncClient(RunAddress(reward=server.address), policy=QUICK)
        scoring = tasks.create_task(client.score(items(100)))
        await service.is_asked.wait()
        await client.close()
    assert scoring.cancelled()
