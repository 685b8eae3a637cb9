"""Closing an asynchronous client ends what waits for its calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import CancelledError
from typing import Any

import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client import (
    AsyncClient,
    Client,
    NewPrompt,
    PromptEvent,
    RetryPolicy,
    RunAddress,
    ScoreItem,
)
from sluice.errors import ConfigError, SluiceError
from sluice.types import ChatMessage
from tests.support.rpc_server import serving
from tests.support.threaded_run import threaded_run
from tests.support.token_replica import TokenReplica

PROMPTS = [NewPrompt("a", (ChatMessage("user", "2 + 2?"),), "math_dapo", "4")]
QUICK = RetryPolicy(first_s=0.01, max_s=0.02)


class LastingTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Reports one step, and no end."""

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield trainer_pb2.WatchStepsResponse(step=1)
        await asyncio.Event().wait()


class LastingReward(reward_pb2_grpc.RewardServiceServicer):
    """Accepts prompts and ends none."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def SubmitPrompts(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls += 1
        async for request in request_iterator:
            receipt = reward_pb2.PromptReceipt(prompt_id=request.prompt_id)
            yield reward_pb2.SubmitPromptsResponse(receipt=receipt)
        await asyncio.Event().wait()


async def test_a_submission_ends_with_its_client_and_is_not_made_again() -> None:
    reward, reported, is_reported = LastingReward(), list[PromptEvent](), asyncio.Event()
    async with (
        serving(reward=reward) as server,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        client = AsyncClient(RunAddress(reward=server.address), policy=QUICK)

        async def submit() -> None:
            async for event in client.submit(PROMPTS):
                reported.append(event)
                is_reported.set()

        submitting = tasks.create_task(submit())
        await is_reported.wait()
        await client.close()
    assert submitting.cancelled()
    assert [event.event for event in reported] == ["accepted"]
    assert reward.num_calls == 1


async def test_watching_the_steps_ends_with_its_client() -> None:
    reported, is_reported = list[int](), asyncio.Event()
    async with (
        serving(trainer=LastingTrainer()) as server,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        client = AsyncClient(RunAddress(trainer=server.address, reward=server.address))

        async def watch() -> None:
            async for step, _ in client.steps():
                reported.append(step)
                is_reported.set()

        watching = tasks.create_task(watch())
        await is_reported.wait()
        await client.close()
    assert watching.cancelled()
    assert reported == [1]


@pytest.mark.parametrize("asks", ["submit", "score"])
async def test_a_client_that_is_closed_between_two_tries_makes_no_other(asks: str) -> None:
    patient = RetryPolicy(first_s=0.2, max_s=0.2, patience_s=3600.0)
    client = AsyncClient(RunAddress(reward="127.0.0.1:1"), policy=patient)

    def answer() -> Awaitable[object]:
        if asks == "submit":
            return anext(client.submit(PROMPTS))
        return client.score([ScoreItem("math_dapo", "4", "4")])

    async def ask() -> None:
        with pytest.raises(ConfigError, match="client: it is closed"):
            await answer()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask())
        await asyncio.sleep(0.1)
        await client.close()
    assert asking.done()  # cancelled if it was closed while a try was under way


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient(RunAddress(reward="127.0.0.1:1"), policy=QUICK)
    await client.close()
    with pytest.raises(ConfigError, match="client: it is closed; open another one"):
        await anext(client.submit(PROMPTS))
    with pytest.raises(ConfigError, match="client: it is closed; open another one"):
        await client.status()
    with pytest.raises(ConfigError, match="client: it is closed; open another one"):
        await anext(client.steps())
    with pytest.raises(ConfigError, match="client: it is closed; open another one"):
        await client.score([ScoreItem("math_dapo", "4", "4")])


PATIENT = RetryPolicy(first_s=600.0, max_s=600.0, patience_s=3600.0)


@pytest.mark.parametrize("waits_for", ["tokens", "another try"])
def test_a_closed_client_ends_the_calls_of_other_threads(waits_for: str) -> None:
    replica = TokenReplica(hangs_after=0) if waits_for == "tokens" else TokenReplica(breaks_after=0)
    ended: list[BaseException] = []
    with threaded_run(replica) as address:
        client = Client(address, policy=PATIENT)

        def generate() -> None:
            try:
                client.generate("text")
            except (CancelledError, SluiceError) as error:
                ended.append(error)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        for _ in range(6000):
            if replica.requests:
                break
            threading.Event().wait(0.01)
        client.close()
        thread.join(60)
        assert not thread.is_alive()
    assert len(ended) == 1


def test_a_closed_synchronous_client_says_so() -> None:
    client = Client(RunAddress())
    client.close()
    with pytest.raises(SluiceError, match="client: it is closed"):
        client.generate("text")
