"""What every server of ours does: errors, limits, health, reflection, clear refusal of a port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2
from sluice.errors import ConfigError, ExhaustedError, InvalidRequestError
from sluice.rpc.client import open_channel, reward_stub, unary_call
from sluice.rpc.ports import bind_socket, check_bindable
from sluice.rpc.server import RpcServer
from tests.support.loopback import needs_ipv6
from tests.support.rpc_server import LIMIT_BYTES, REWARD, TRAINER, connected, rpc_server, serving


class Failing(reward_pb2_grpc.RewardServiceServicer):
    """Raises what it is given, from inside a task group if asked to."""

    def __init__(self, *failures: Exception, grouped: bool = False) -> None:
        self.failures, self.grouped = failures, grouped

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if self.grouped:
            async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
                for failure in self.failures:
                    (inner if failure is self.failures[0] else outer).create_task(_raise(failure))
        raise self.failures[0]


async def _raise(error: Exception) -> None:
    raise error


async def failed_status(servicer: Any) -> grpc.aio.AioRpcError:
    async with connected(reward=servicer) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_stub(channel).GetStatus(reward_pb2.GetStatusRequest(), timeout=60)
    return caught.value


async def test_an_error_inside_nested_task_groups_reaches_the_client_with_its_code() -> None:
    error = await failed_status(Failing(ExhaustedError("queue: 9 of 9"), grouped=True))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "queue: 9 of 9"


async def test_a_long_error_in_other_letters_arrives_as_what_it_was() -> None:
    error = await failed_status(Failing(InvalidRequestError("é日本\n" * 5000)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("é日本")


async def test_a_defect_beside_an_error_of_ours_is_logged_and_not_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = Failing(ExhaustedError("queue: 9 of 9"), KeyError("secret"), grouped=True)
    error = await failed_status(both)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "secret" not in (error.details() or "")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_defect_becomes_an_opaque_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    error = await failed_status(Failing(KeyError("secret")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert "GetStatus: unexpected KeyError" in caplog.text


class Counting(reward_pb2_grpc.RewardServiceServicer):
    """Counts scored items and cancelled calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Score(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return reward_pb2.ScoreResponse()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


async def test_a_message_over_the_limit_is_refused_before_the_handler() -> None:
    peer = Counting()
    large = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(response="x" * LIMIT_BYTES)])
    async with connected(reward=peer) as channel:
        with pytest.raises(InvalidRequestError, match=r"larger than max .*max_message_mb"):
            await unary_call(reward_stub(channel).Score, large, peer="it", phase="scoring")
    assert peer.calls == 0


async def test_a_cancelled_call_cancels_its_handler() -> None:
    peer = Counting()
    async with connected(reward=peer) as channel, asyncio.timeout(60):
        call = reward_stub(channel).GetStatus(reward_pb2.GetStatusRequest())
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(peer.entered.wait())
            await asyncio.wait([waiting, tasks.create_task(_cancelled(call, peer.entered))])
        await peer.cancelled.wait()


async def _cancelled(call: Any, entered: asyncio.Event) -> None:
    await entered.wait()
    call.cancel()


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use; .*set another"):
            await rpc_server(port=port).start()


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_a_server_on_ipv6_is_reached_at_the_address_it_names(host: str) -> None:
    async with serving(host=host) as server:
        assert server.address == f"[::1]:{server.port}"
        async with open_channel(server.address, max_message_bytes=LIMIT_BYTES) as channel:
            assert await health(channel, REWARD) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(ConfigError, match=r"on \[?::1\]? is in use"):
            await rpc_server(host=host, port=server.port).start()


async def test_two_servers_never_share_a_port() -> None:
    async with serving() as first:
        with pytest.raises(ConfigError, match="is in use"):
            await rpc_server(port=first.port).start()


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status


async def test_health_answers_for_the_server_and_each_service_and_follows_its_state() -> None:
    states = health_pb2.HealthCheckResponse
    async with (
        serving() as server,
        open_channel(server.address, max_message_bytes=LIMIT_BYTES) as channel,
    ):
        for name in ("", REWARD, TRAINER):
            assert await health(channel, name) == states.SERVING
        await server.set_serving(serving=False)
        for name in ("", REWARD, TRAINER):
            assert await health(channel, name) == states.NOT_SERVING


async def test_reflection_lists_the_services_and_describes_them() -> None:
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=REWARD),
    ]
    async with connected() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=60)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {REWARD, TRAINER, "grpc.health.v1.Health"} <= names
    assert answers[1].file_descriptor_response.file_descriptor_proto


NO_MESSAGE = b"\xff\xff\xff"


async def unary(request: Any, context: Any) -> Any:
    return trainer_pb2.PauseResponse(step=request.ByteSize())


async def stream(requests: Any, context: Any) -> None:
    async for request in requests:
        await context.write(trainer_pb2.PauseResponse(step=request.ByteSize()))


def register(server: Any) -> None:
    coders = {
        "request_deserializer": trainer_pb2.PauseRequest.FromString,
        "response_serializer": trainer_pb2.PauseResponse.SerializeToString,
    }
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, **coders),
        "Stream": grpc.stream_stream_rpc_method_handler(stream, **coders),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.T", handlers),))


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    server = RpcServer([register], ["test.T"], host="127.0.0.1", port=0, max_message_bytes=1 << 20)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as opened:
        yield opened
    await server.stop(0)


async def test_a_call_with_bytes_that_are_no_message_is_refused(channel: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no message of this method") as caught:
        await channel.unary_unary("/test.T/Unary")(NO_MESSAGE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await channel.unary_unary("/test.T/Unary")(b"") == b""


async def test_a_stream_with_bytes_that_are_no_message_is_refused(channel: Any) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield b""
        yield NO_MESSAGE

    call = channel.stream_stream("/test.T/Stream")(sent())
    with pytest.raises(grpc.aio.AioRpcError, match="no message of this method") as caught:
        [answer async for answer in call]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_bound_socket_keeps_its_port_from_others(host: str) -> None:
    with bind_socket(host, 0) as held:
        port = held.getsockname()[1]
        with held.__class__(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
    assert port


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_is_bound_with_and_without_brackets(host: str) -> None:
    with bind_socket(host, 0) as held:
        assert held.family is socket.AF_INET6
        assert held.getsockname()[0] == "::1"


@needs_ipv6
def test_a_port_in_use_on_ipv6_is_named() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on ::1 is in use; .* set another"):
            check_bindable("::1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_a_foreign_interface_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host {host}, port 0: cannot listen there"):
        check_bindable(host, 0)
