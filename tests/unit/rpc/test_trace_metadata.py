"""Trace context travels in the metadata of calls, and only where this process is traced."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.rpc.client import reward_stub, stream_call, unary_call
from sluice.rpc.metadata import TRACEPARENT, caller_context, served_span
from sluice.telemetry.tracing import TRACER, SpanName, TraceContext
from tests.support.rpc_server import connected
from tests.support.seen_spans import traced

CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)


class Listener(reward_pb2_grpc.RewardServiceServicer):
    """Notes the metadata of its calls, and serves them in spans."""

    def __init__(self) -> None:
        self.sent: list[str | None] = []

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self._note(context)
        with served_span(SpanName.SERVE, context), TRACER.span(SpanName.SAMPLE):
            return reward_pb2.GetStatusResponse()

    async def TakeSamples(self, request: Any, context: Any) -> Any:
        self._note(context)
        yield reward_pb2.TakeSamplesResponse(sample=reward_pb2.BatchSample(row=7))

    def _note(self, context: Any) -> None:
        self.sent.append(dict(context.invocation_metadata()).get(TRACEPARENT))


async def ask(channel: Any) -> None:
    await unary_call(
        reward_stub(channel).GetStatus,
        reward_pb2.GetStatusRequest(),
        peer="reward service",
        phase="asking",
    )


async def listen(channel: Any) -> None:
    stream = stream_call(
        reward_stub(channel).TakeSamples,
        reward_pb2.TakeSamplesRequest(batch_id="b"),
        peer="reward service",
        phase="asking",
    )
    async with aclosing(stream) as answers:
        assert [answer.sample.row async for answer in answers] == [7]


async def test_calls_send_the_present_span_and_the_server_continues_it() -> None:
    peer = Listener()
    async with connected(reward=peer) as channel:
        with traced() as kept, TRACER.trace(SpanName.ATTEMPT) as attempt:
            await ask(channel)
            await listen(channel)
    assert attempt.context is not None
    assert peer.sent == [attempt.context.traceparent] * 2
    sample, serve, _ = kept.spans
    assert serve.parent_id == attempt.context.span_id
    assert sample.parent_id == serve.context.span_id
    assert sample.context.trace_id == attempt.context.trace_id


async def test_what_is_not_recorded_here_is_not_recorded_there() -> None:
    peer = Listener()
    async with connected(reward=peer) as channel:
        with traced() as kept, TRACER.unrecorded():
            await ask(channel)
    (sent,) = peer.sent
    assert sent is not None
    assert sent.endswith("-00")
    assert kept.begun == 0


async def test_calls_tell_nothing_where_nothing_is_traced() -> None:
    peer = Listener()
    async with connected(reward=peer) as channel:
        await ask(channel)
        await listen(channel)
        with traced():  # but of no span
            await ask(channel)
    assert peer.sent == [None] * 3


class Call:
    """A servicer's context with metadata."""

    def __init__(self, *metadata: tuple[str, Any]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> Any:
        return self.metadata or None


@pytest.mark.parametrize(
    ("call", "context"),
    [
        (Call(("a", "b"), (TRACEPARENT, CALLER.traceparent)), CALLER),
        (Call((TRACEPARENT, "nonsense")), None),
        (Call((TRACEPARENT, b"\xff")), None),
        (Call(), None),
    ],
)
def test_a_callers_context_is_read_and_nonsense_is_none(
    call: Call, context: TraceContext | None
) -> None:
    with traced():
        assert caller_context(call) == context
    assert caller_context(call) is None


def test_who_calls_from_outside_is_recorded_in_proportion_unless_it_is_followed() -> None:
    odd = TraceContext((1 << 64) - 1, 0xDEF, is_sampled=True)
    call = Call((TRACEPARENT, odd.traceparent))
    for name, count in ((SpanName.SERVE, 0), (SpanName.RECEIVE_WEIGHTS, 1)):
        with traced(0.5, follows_callers=False) as kept:
            with served_span(name, call):
                assert TRACER.current() is not None
            assert len(kept.spans) == count
            context = caller_context(call)
            assert context is not None
            assert not context.is_sampled
            assert caller_context(Call((TRACEPARENT, CALLER.traceparent))) == CALLER
    with traced(0.5, follows_callers=True) as kept, served_span(SpanName.SERVE, call):
        pass
    assert len(kept.spans) == 1
