"""Calls to peers over real connections: retries, deadlines, errors."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from threading import Semaphore
from typing import Any

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.errors import (
    BatchUnfillableError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    PeerError,
    SluiceError,
)
from sluice.rpc import client
from sluice.rpc.client import (
    NOBODY,
    call_after_backlog,
    open_channel,
    reward_stub,
    stream_call,
    trainer_stub,
    unary_call,
)
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from tests.support.rpc_server import connected


class Flaky(reward_pb2_grpc.RewardServiceServicer):
    """Fails `failures` times with `error` before it answers."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    async def _answer(self, answer: Any) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return answer

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return await self._answer(reward_pb2.GetStatusResponse(prompts_submitted=7))

    async def Evaluate(self, request: Any, context: Any) -> Any:
        return await self._answer(reward_pb2.EvaluateResponse())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {
        name: CallPolicy(policy.deadline_s, policy.attempts, backoff_s=0.0)
        for name, policy in CALL_POLICIES.items()
    }
    monkeypatch.setattr(client, "CALL_POLICIES", quick)


async def get_status(channel: Any, deadline_s: float | None = None) -> Any:
    return await unary_call(
        reward_stub(channel).GetStatus,
        reward_pb2.GetStatusRequest(),
        peer="reward service",
        phase="asking for its status",
        deadline_s=deadline_s,
    )


async def evaluate(channel: Any) -> Any:
    return await unary_call(
        reward_stub(channel).Evaluate,
        reward_pb2.EvaluateRequest(),
        peer="reward service",
        phase="evaluating",
    )


async def test_an_idempotent_call_is_repeated_while_the_peer_is_unavailable() -> None:
    peer = Flaky(2, NotReadyError("still loading"))
    async with connected(reward=peer) as channel:
        assert (await get_status(channel)).prompts_submitted == 7
    assert peer.calls == 3


async def test_repeating_ends_with_the_attempts_of_the_table() -> None:
    peer = Flaky(99, NotReadyError("still loading"))
    async with connected(reward=peer) as channel:
        with pytest.raises(PeerError, match=r"reward service: failed while asking .*still loading"):
            await get_status(channel)
    assert peer.calls == CALL_POLICIES["RewardService/GetStatus"].attempts


async def test_a_call_that_is_not_idempotent_is_made_once() -> None:
    peer = Flaky(1, NotReadyError("still loading"))
    async with connected(reward=peer) as channel:
        with pytest.raises(PeerError, match="still loading"):
            await evaluate(channel)
    assert peer.calls == 1


@pytest.mark.parametrize(
    "error", [InvalidRequestError("n: 0"), BatchUnfillableError("no data"), ConfigError("key x")]
)
async def test_what_cannot_succeed_by_repeating_is_not_repeated(error: SluiceError) -> None:
    peer = Flaky(1, error)
    async with connected(reward=peer) as channel:
        with pytest.raises(type(error), match=str(error)):
            await get_status(channel)
    assert peer.calls == 1


class Silent(reward_pb2_grpc.RewardServiceServicer):
    """Never answers."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()


async def test_a_deadline_names_peer_and_phase_and_is_not_repeated() -> None:
    async with connected(reward=Silent()) as channel:
        with pytest.raises(DeadlineError) as caught:
            await get_status(channel, deadline_s=0.1)
    assert (caught.value.peer, caught.value.seconds) == ("reward service", 0.1)
    assert "no answer within 0.1 s while asking for its status" in str(caught.value)


async def test_a_deadline_of_zero_seconds_is_zero_and_not_the_tables() -> None:
    async with connected(reward=Silent()) as channel:
        with pytest.raises(DeadlineError, match="within 0 s"):
            await get_status(channel, deadline_s=0.0)


async def test_a_peer_that_is_not_there_is_named() -> None:
    async with open_channel("127.0.0.1:1", max_message_bytes=1000) as channel:
        with pytest.raises(PeerError, match="reward service: failed while asking"):
            await get_status(channel)


class Counting(trainer_pb2_grpc.TrainerServiceServicer):
    """Counts up for ever, or fails after two messages."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.has_ended = asyncio.Event()

    async def WatchSteps(self, request: Any, context: Any) -> Any:
        try:
            for step in (1, 2):
                yield trainer_pb2.WatchStepsResponse(step=step)
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:  # by CancelledError where it waits, by GeneratorExit where it was sending
            self.has_ended.set()


def watch(channel: Any) -> Any:
    return stream_call(
        trainer_stub(channel).WatchSteps,
        trainer_pb2.WatchStepsRequest(),
        peer="trainer",
        phase="watching steps",
    )


class Message:
    """Unlike a protobuf message it can be watched."""


class OneMessage:
    """A call with one message; the next never comes."""

    def __init__(self) -> None:
        self.messages = [Message()]

    async def read(self) -> object:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop()

    def cancel(self) -> bool:
        return True


async def test_a_stream_that_waits_does_not_keep_its_last_message() -> None:
    method: Any = lambda *_, **__: OneMessage()  # noqa: E731
    stream: Any = stream_call(
        method,
        trainer_pb2.WatchStepsRequest(),
        peer="trainer",
        phase="watching steps",
    )
    message = await anext(stream)
    kept = weakref.ref(message)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(anext(stream))
        await asyncio.sleep(0)
        del message
        assert kept() is None
        waiting.cancel()
    await stream.aclose()


async def test_leaving_a_stream_early_ends_its_handler() -> None:
    peer = Counting()
    async with connected(trainer=peer) as channel:
        async with aclosing(watch(channel)) as messages:
            async for message in messages:
                assert message.step == 1
                break
        async with asyncio.timeout(60):
            await peer.has_ended.wait()


async def test_an_error_in_a_stream_arrives_after_its_messages() -> None:
    async with connected(trainer=Counting(BatchUnfillableError("no data"))) as channel:
        messages = watch(channel)
        assert [(await anext(messages)).step for _ in range(2)] == [1, 2]
        with pytest.raises(BatchUnfillableError, match="no data"):
            await anext(messages)


class Outline(reward_pb2_grpc.RewardServiceServicer):
    """Sends one message of a stream, and then none, from threads of its own."""

    def __init__(self) -> None:
        self.has_sent = Semaphore(0)

    def TakeSamples(self, request: Any, context: Any) -> Iterator[Any]:
        yield reward_pb2.TakeSamplesResponse()
        self.has_sent.release()
        over = Semaphore(0)
        context.add_callback(over.release)
        over.acquire()


async def test_a_busy_process_has_read_what_had_come_at_the_end_of_its_backlog() -> None:
    num_streams, service = 24, Outline()
    server = grpc.server(ThreadPoolExecutor(num_streams))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    num_read, is_over = 0, asyncio.Event()

    async def read(call: Any) -> None:
        nonlocal num_read
        await call.read()
        num_read += 1
        assert not service.has_sent.acquire(timeout=0.05)  # keeps the event loop, as work does

    async with (
        open_channel(address, max_message_bytes=1 << 20) as channel,
        open_channel(NOBODY, max_message_bytes=1 << 20) as nobody,
        asyncio.TaskGroup() as tasks,
    ):
        await asyncio.wait_for(channel.channel_ready(), 60)
        stub = reward_stub(channel)
        calls = [stub.TakeSamples(reward_pb2.TakeSamplesRequest()) for _ in range(num_streams)]
        for call in calls:
            tasks.create_task(read(call))
        await asyncio.sleep(0)  # the requests go
        for _ in calls:
            assert service.has_sent.acquire(timeout=60)  # nothing is read meanwhile
        assert num_read == 0
        call_after_backlog(nobody, is_over.set)
        await is_over.wait()
        assert num_read == num_streams
        for call in calls:
            call.cancel()
    server.stop(None).wait()


async def test_a_channel_to_nobody_that_closes_ends_its_wait_for_the_backlog() -> None:
    ends: list[int] = []
    async with open_channel(NOBODY, max_message_bytes=1 << 20) as nobody:
        call_after_backlog(nobody, lambda: ends.append(1))
    await asyncio.sleep(0)
    assert ends == []
