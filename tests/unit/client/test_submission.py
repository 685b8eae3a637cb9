"""Prompts submitted through a service that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.client import AsyncClient, NewPrompt, PromptEvent, RetryPolicy, RunAddress, submission
from sluice.client.submission import OpenPrompts
from sluice.errors import ConfigError, InvalidRequestError, PeerError
from sluice.rpc import policy as call_policy
from sluice.rpc.client import stream_call
from sluice.rpc.policy import CallPolicy
from sluice.types import ChatMessage
from tests.support.rpc_server import serving

QUICK = RetryPolicy(first_s=0.01, max_s=0.02)


def prompt(prompt_id: str, **extra: object) -> NewPrompt:
    return NewPrompt(prompt_id, (ChatMessage("user", "2 + 2?"),), "math_dapo", "4", extra)


@dataclass
class MovingReward(reward_pb2_grpc.RewardServiceServicer):
    """Knows prompts by their ids; breaks each of the first calls after so many receipts.

    Prompts end when a call's input has ended.
    """

    breaks_after: list[int] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        breaks_after = self.breaks_after.pop(0) if self.breaks_after else None
        waiting: list[str] = []
        seen: set[str] = set()
        async for request in request_iterator:
            if len(seen) == breaks_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
            self.requests.append(request)
            twin = request.prompt_id in seen
            seen.add(request.prompt_id)
            if not twin and request.prompt_id not in self.accepted:
                self.accepted.append(request.prompt_id)
            refused = "the id is taken" if twin else ""
            receipt = reward_pb2.PromptReceipt(prompt_id=request.prompt_id, refused_because=refused)
            yield reward_pb2.SubmitPromptsResponse(receipt=receipt)
            waiting += [] if twin else [request.prompt_id]
        for prompt_id in waiting:
            yield _trained(prompt_id)


def _trained(prompt_id: str) -> Any:
    outcome = reward_pb2.PromptOutcome(
        prompt_id=prompt_id, end=reward_pb2.PROMPT_END_TRAINED, step=4
    )
    return reward_pb2.SubmitPromptsResponse(outcome=outcome)


async def submitted(
    reward: MovingReward, prompts: Iterator[NewPrompt] | list[NewPrompt], **options: bool
) -> list[tuple[str, str]]:
    async with (
        serving(reward=reward) as server,
        AsyncClient(RunAddress(reward=server.address), policy=QUICK) as client,
        aclosing(client.submit(prompts, **options)) as events,
    ):
        return [(event.prompt_id, event.event) async for event in events]


async def test_a_broken_call_is_repeated_and_every_prompt_is_reported_once() -> None:
    reward = MovingReward(breaks_after=[2, 1])
    events = await submitted(reward, [prompt(name) for name in "abcd"])
    assert sorted(events) == sorted(
        (name, event) for name in "abcd" for event in ("accepted", "trained")
    )
    assert sorted(reward.accepted) == list("abcd")
    assert len(reward.requests) > 4  # those without an outcome were sent again


async def test_a_second_prompt_of_an_id_is_refused_and_the_first_still_waited_for() -> None:
    events = await submitted(MovingReward(), [prompt("a"), prompt("a")])
    assert events == [("a", "accepted"), ("a", "refused"), ("a", "trained")]


async def test_without_outcomes_the_call_ends_with_the_last_receipt() -> None:
    events = await submitted(
        MovingReward(), (prompt(str(n)) for n in range(3)), until_outcome=False
    )
    assert events == [(str(n), "accepted") for n in range(3)]


async def test_no_more_prompts_are_under_way_than_a_call_may_have() -> None:
    under_way = OpenPrompts((prompt(str(n)) for n in range(1025)), until_outcome=True)
    requests = under_way.requests()
    for _ in range(1024):
        await anext(requests)
    under_way.new_events(PromptEvent("0", "accepted", None, (), ""))
    async with asyncio.TaskGroup() as tasks:
        last = tasks.create_task(anext(requests))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not last.done()
        under_way.new_events(PromptEvent("0", "trained", 1, (), ""))
    assert last.result().prompt_id == "1024"


async def test_the_input_stays_open_until_every_prompt_has_a_receipt_that_is_final() -> None:
    under_way = OpenPrompts([prompt("a")], until_outcome=True)
    requests = under_way.requests()
    assert (await anext(requests)).prompt_id == "a"
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(anext(requests, None))
        await asyncio.sleep(0.01)
        assert not following.done()
        assert not under_way.new_events(PromptEvent("a", "refused", None, (), "full", True))
        under_way.new_events(PromptEvent("another call's", "trained", 1, (), ""))  # freed capacity
    sent_again = following.result()
    assert sent_again is not None
    assert sent_again.prompt_id == "a"
    under_way.new_events(PromptEvent("a", "accepted", None, (), ""))
    assert await anext(requests, None) is None


async def test_a_held_second_prompt_of_an_id_is_not_sent_once_the_first_has_ended() -> None:
    under_way = OpenPrompts([prompt("a"), prompt("a"), prompt("b")], until_outcome=True)
    requests = under_way.requests()
    assert [(await anext(requests)).prompt_id for _ in range(2)] == ["a", "a"]
    under_way.new_events(PromptEvent("a", "accepted", None, (), ""))
    under_way.new_events(PromptEvent("a", "refused", None, (), "full", True))
    under_way.new_events(PromptEvent("a", "trained", 1, (), ""))
    assert (await anext(requests)).prompt_id == "b"


async def test_a_call_that_grpc_cancels_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    async def cancelled_first(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
        calls.append(named["name"])
        if len(calls) == 1:
            raise asyncio.CancelledError
        async with aclosing(stream_call(*arguments, **named)) as answers:
            async for answer in answers:
                yield answer

    monkeypatch.setattr(submission, "stream_call", cancelled_first)
    events = await submitted(MovingReward(), [prompt("a")])
    assert events == [("a", "accepted"), ("a", "trained")]
    assert len(calls) == 2


async def test_no_prompts_are_no_events() -> None:
    assert await submitted(MovingReward(), []) == []


async def test_extra_info_travels_and_what_cannot_is_refused_with_its_prompt() -> None:
    reward = MovingReward()
    await submitted(reward, [prompt("a", level=3, tags=["x"], nested={"is": True})])
    assert MessageToDict(reward.requests[0].extra_info) == {
        "level": 3.0,
        "tags": ["x"],
        "nested": {"is": True},
    }
    with pytest.raises(InvalidRequestError, match=r"prompt b: extra_info: cannot be sent"):
        await submitted(reward, [prompt("a"), prompt("b", when=object())])


async def test_a_failure_of_the_callers_own_iterator_is_the_callers() -> None:
    def prompts() -> Iterator[NewPrompt]:
        yield prompt("a")
        raise ValueError("line 2")

    with pytest.raises(ValueError, match="line 2"):
        await submitted(MovingReward(), prompts())


async def test_a_service_that_stays_away_is_an_error_that_names_it() -> None:
    address = RunAddress(reward="127.0.0.1:1")
    policy = RetryPolicy(first_s=0.01, max_s=0.01, patience_s=0.05)
    async with AsyncClient(address, policy=policy) as client:
        with pytest.raises(PeerError, match=r"127\.0\.0\.1:1: failed while submitting prompts"):
            async for _ in client.submit([prompt("a")]):
                pass


async def test_a_call_that_reaches_its_own_deadline_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass
    class LastingReward(MovingReward):
        """Its first call lasts until its deadline, and reports no outcome."""

        num_calls: int = 0

        async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            self.num_calls += 1
            lasts = self.num_calls < 2
            async for answer in super().SubmitPrompts(request_iterator, context):
                if not (lasts and answer.HasField("outcome")):
                    yield answer
            if lasts:
                await asyncio.Event().wait()

    name = "RewardService/SubmitPrompts"
    monkeypatch.setitem(call_policy.CALL_POLICIES, name, CallPolicy(deadline_s=0.5))
    reward = LastingReward()
    async with asyncio.timeout(60):
        events = await submitted(reward, [prompt("a"), prompt("b")])
    assert reward.num_calls >= 2
    assert sorted(events) == [(n, event) for n in "ab" for event in ("accepted", "trained")]


async def test_without_an_address_the_client_says_which_is_missing() -> None:
    async with AsyncClient(RunAddress()) as client:
        with pytest.raises(ConfigError, match="no address of a reward service"):
            client.submit([])
        with pytest.raises(ConfigError, match="no address of a trainer"):
            await client.generate("text")
        with pytest.raises(ConfigError, match="no address of a trainer"):
            await client.status()
