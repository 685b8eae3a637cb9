"""Prompts submitted to a service with capacity for a few at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.client import AsyncClient, NewPrompt, PromptEvent, RetryPolicy, RunAddress
from sluice.types import ChatMessage
from tests.support.rpc_server import serving

QUICK = RetryPolicy(first_s=0.01, max_s=0.05)


@dataclass
class SmallReward(reward_pb2_grpc.RewardServiceServicer):
    """Takes `capacity` prompts at a time; each ends `ends_after_s` later, or never.

    Attributes:
        tells: whether its receipts say that a prompt may be sent again, as older ones do not.
        breaks_after: requests after which the first call breaks off.
    """

    capacity: int
    ends_after_s: float | None = 0.01
    tells: bool = True
    breaks_after: int | None = None
    num_calls: int = 0
    pending: set[str] = field(default_factory=set)
    sent: Counter[str] = field(default_factory=Counter)

    def _receipt(self, name: str, open_here: set[str]) -> reward_pb2.PromptReceipt:
        receipt = reward_pb2.PromptReceipt(prompt_id=name)
        if name in open_here:
            receipt.refused_because = "was used before"
        elif name not in self.pending and len(self.pending) >= self.capacity:
            receipt.refused_because = f"{self.capacity} prompts are unfinished"
            receipt.retryable = self.tells
        else:
            self.pending.add(name)
            open_here.add(name)
        return receipt

    async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls += 1
        reported: asyncio.Queue[Any] = asyncio.Queue()
        open_here: set[str] = set()

        async def end(prompt_id: str) -> None:
            if self.ends_after_s is None:
                return
            await asyncio.sleep(self.ends_after_s)
            self.pending.discard(prompt_id)
            open_here.discard(prompt_id)
            outcome = reward_pb2.PromptOutcome(
                prompt_id=prompt_id, end=reward_pb2.PROMPT_END_TRAINED, step=1
            )
            await reported.put(reward_pb2.SubmitPromptsResponse(outcome=outcome))

        async def read(tasks: asyncio.TaskGroup) -> None:
            async for request in request_iterator:
                name = request.prompt_id
                self.sent[name] += 1
                if sum(self.sent.values()) == self.breaks_after:
                    await reported.put(None)
                    return
                receipt = self._receipt(name, open_here)
                await reported.put(reward_pb2.SubmitPromptsResponse(receipt=receipt))
                if not receipt.refused_because:
                    tasks.create_task(end(name))
            while open_here:
                await asyncio.sleep(0.01)
            await reported.put(None)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read(tasks))
            while (event := await reported.get()) is not None:
                yield event


async def submitted(
    reward: SmallReward,
    count: int,
    *,
    until_outcome: bool = True,
    policy: RetryPolicy = QUICK,
) -> list[PromptEvent]:
    prompts = [
        NewPrompt(str(n), (ChatMessage("user", "2 + 2?"),), "math_dapo", "4") for n in range(count)
    ]
    async with (
        serving(reward=reward) as server,
        AsyncClient(RunAddress(reward=server.address), policy=policy) as client,
        asyncio.timeout(120),
        aclosing(client.submit(prompts, until_outcome=until_outcome)) as events,
    ):
        return [event async for event in events]


def reported(events: list[PromptEvent]) -> Counter[tuple[str, str]]:
    return Counter((event.prompt_id, event.event) for event in events)


async def test_prompts_beyond_the_capacity_wait_and_each_is_reported_once() -> None:
    reward = SmallReward(capacity=5)
    events = await submitted(reward, 60)
    assert reported(events) == Counter(
        (str(n), event) for n in range(60) for event in ("accepted", "trained")
    )
    assert reward.num_calls == 1


async def test_an_outcome_lets_the_next_follow_without_a_pause() -> None:
    policy = RetryPolicy(first_s=120.0, max_s=120.0)
    events = await submitted(SmallReward(capacity=5), 30, policy=policy)
    assert Counter(event.event for event in events) == {"accepted": 30, "trained": 30}


async def test_without_outcomes_prompts_wait_for_those_before_them_too() -> None:
    events = await submitted(SmallReward(capacity=5), 60, until_outcome=False)
    assert reported(events) == Counter((str(n), "accepted") for n in range(60))


async def test_prompts_wait_longer_than_the_patience_for_their_outcomes() -> None:
    policy = RetryPolicy(first_s=0.01, max_s=0.05, patience_s=0.02)
    events = await submitted(SmallReward(capacity=1, ends_after_s=0.2), 4, policy=policy)
    assert Counter(event.event for event in events) == {"accepted": 4, "trained": 4}


async def test_without_outcomes_prompts_are_refused_with_the_reason_when_patience_ends() -> None:
    reward = SmallReward(capacity=5, ends_after_s=None)
    policy = replace(QUICK, patience_s=0.3)
    events = await submitted(reward, 60, until_outcome=False, policy=policy)
    assert Counter(event.event for event in events) == {"accepted": 5, "refused": 55}
    assert len({event.prompt_id for event in events}) == 60
    assert {event.detail for event in events} == {"", "5 prompts are unfinished"}
    # Sent again: one a pause of 25 ms or more, for 0.3 s and what the machine adds.
    assert sum(reward.sent.values()) < 60 + 40


async def test_a_refusal_without_retryable_is_final() -> None:
    reward = SmallReward(capacity=5, tells=False)
    events = await submitted(reward, 60)
    refused = [event for event in events if event.event == "refused"]
    assert len(refused) >= 1
    assert len(events) == len(refused) + 2 * (60 - len(refused))
    assert set(reward.sent.values()) == {1}


async def test_held_prompts_outlive_a_broken_call() -> None:
    events = await submitted(SmallReward(capacity=5, breaks_after=30), 40)
    assert reported(events) == Counter(
        (str(n), event) for n in range(40) for event in ("accepted", "trained")
    )


async def test_a_prompt_whose_id_is_too_long_to_be_echoed_is_reported() -> None:
    class Refusing(SmallReward):
        async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            async for request in request_iterator:
                receipt = reward_pb2.PromptReceipt(
                    prompt_id=request.prompt_id[:128], refused_because="prompt_id: 200 bytes"
                )
                yield reward_pb2.SubmitPromptsResponse(receipt=receipt)

    prompts = [NewPrompt("x" * 200, (ChatMessage("user", "2 + 2?"),), "math_dapo", "4")]
    async with (
        serving(reward=Refusing(capacity=1)) as server,
        AsyncClient(RunAddress(reward=server.address), policy=QUICK) as client,
        asyncio.timeout(60),
    ):
        events = [event async for event in client.submit(prompts)]
    assert [event.event for event in events] == ["refused"]
