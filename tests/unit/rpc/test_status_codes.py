"""Errors become statuses and errors again."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from sluice import errors
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.errors import HandshakeError, NotReadyError, PeerError
from sluice.rpc import status as remedies
from sluice.rpc.client import open_channel, reward_stub, unary_call
from sluice.rpc.status import (
    CLASS_KEY,
    RPC_ERRORS,
    error_of,
    expect_no_tls,
    handshake_remedy,
    short_method,
    status_of,
)
from tests.support.rpc_server import LIMIT_BYTES, connected

PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
ALL_ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.SluiceError) and kind is not errors.SluiceError
]


# The caller's machine may have the package.
SENT_AS = {
    errors.MissingPackageError: errors.ConfigError,
    errors.SandboxUnavailableError: errors.EnvironmentUnavailable,
}


def example(kind: type[errors.SluiceError]) -> errors.SluiceError:
    if kind is errors.DeadlineError:
        return errors.DeadlineError("rollout-3", "counting", 2.0)
    if issubclass(kind, errors.PeerError | errors.WeightSyncError):
        return kind("rollout-3", "counting", "it fell over")
    return kind("field x: 7 is too much; use 5")


def over_the_wire(error: errors.SluiceError) -> errors.SluiceError:
    status = status_of(error)
    return error_of(
        status.code,
        status.details,
        dict(status.trailing_metadata).get(CLASS_KEY),
        peer="reward service",
        phase="taking a batch",
        deadline_s=5.0,
    )


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_has_a_code_of_its_own_or_carries_its_class(
    kind: type[errors.SluiceError],
) -> None:
    status = status_of(example(kind))
    assert status.code is not grpc.StatusCode.UNKNOWN
    assert dict(status.trailing_metadata) == {CLASS_KEY: SENT_AS.get(kind, kind).__name__}


# A peer that is not ready has failed us, and one whose engine fails is broken.
ARRIVES_AS = {
    errors.HandshakeError: errors.PeerError,  # another one's handshake
    errors.NotReadyError: errors.PeerError,
    errors.EngineError: errors.PeerDefectError,
    errors.EnvironmentDefectError: errors.PeerDefectError,
    errors.EnvironmentUnavailable: errors.PeerError,
    errors.SandboxUnavailableError: errors.PeerError,
}


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_an_error_arrives_as_what_it_was_with_its_words(kind: type[errors.SluiceError]) -> None:
    sent = example(kind)
    arrived = over_the_wire(sent)
    assert type(arrived) is ARRIVES_AS.get(kind, SENT_AS.get(kind, kind))
    assert str(sent) in str(arrived)


def test_a_subclass_travels_as_the_class_in_the_table() -> None:
    class GroupFailedError(errors.DataError):
        pass

    assert type(over_the_wire(GroupFailedError("x"))) is errors.DataError


@pytest.mark.parametrize(
    ("code", "reserved"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, None),
        (grpc.StatusCode.FAILED_PRECONDITION, ""),
        (grpc.StatusCode.FAILED_PRECONDITION, "InvalidRequestError"),  # of another code
        (grpc.StatusCode.FAILED_PRECONDITION, "KeyboardInterrupt"),
        (grpc.StatusCode.UNAVAILABLE, "BatchUnfillableError"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None),
        (grpc.StatusCode.CANCELLED, None),
        (grpc.StatusCode.UNIMPLEMENTED, None),
    ],
)
def test_a_class_that_the_table_does_not_give_this_code_is_not_believed(
    code: grpc.StatusCode, reserved: str | None
) -> None:
    error = error_of(code, "words", reserved, peer="trainer", phase="asking", deadline_s=1.0)
    assert type(error) is errors.PeerError
    assert str(error) == f"trainer: failed while asking: {code.name}: words"


@pytest.mark.parametrize("reserved", [None, "BatchUnfillableError", "EngineError"])
def test_an_internal_error_is_a_defect_of_the_peer_and_still_an_error_of_it(
    reserved: str | None,
) -> None:
    code = grpc.StatusCode.INTERNAL
    error = error_of(code, "words", reserved, peer="trainer", phase="asking", deadline_s=1.0)
    assert type(error) is errors.PeerDefectError
    assert isinstance(error, errors.PeerError)
    assert str(error) == "trainer: failed while asking: INTERNAL: words"


def test_details_are_cut_to_what_metadata_can_carry() -> None:
    for text in ("é" * 100_000, "x" * 100_000, "%" * 3000, "日本\n" * 3000, "\U0001f600" * 3000):
        details = status_of(errors.DataError(text)).details
        encoded = quote(details, safe=PLAIN)
        assert text.startswith(details)
        assert 1980 < len(encoded) <= 2000
    assert status_of(errors.DataError("é" * 333)).details == "é" * 333


async def test_an_error_with_text_that_cannot_be_sent_arrives_at_once() -> None:
    lost = errors.DataError("train-\udcff.parquet: \ud83d")  # a file name, half a surrogate pair
    async with connected(reward=Reward([lost])) as channel:
        with pytest.raises(errors.DataError) as raised:
            await ask(channel)
    assert str(raised.value) == "train-?.parquet: ?"


NAME = "RewardService/GetStatus"


async def ask(channel: grpc.aio.Channel) -> None:
    await unary_call(
        reward_stub(channel).GetStatus,
        reward_pb2.GetStatusRequest(),
        peer="reward",
        phase="asking",
    )


class Reward(reward_pb2_grpc.RewardServiceServicer):
    """Fails as scripted."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors

    async def GetStatus(self, request: Any, context: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return reward_pb2.GetStatusResponse()


async def counted(*errors: Exception) -> dict[tuple[str, ...], int]:
    """What the tally has more than before, after a call that meets these errors."""
    before = Counter(RPC_ERRORS.counts())
    async with connected(reward=Reward(list(errors))) as channel:
        with suppress(PeerError):
            await ask(channel)
    return dict(Counter(RPC_ERRORS.counts()) - before)


async def test_a_call_that_ends_well_is_not_counted() -> None:
    assert await counted() == {}


async def test_every_attempt_that_fails_is_counted_where_it_was_answered_and_where_it_was_met() -> (
    None
):
    found = await counted(NotReadyError("not yet"))
    assert found == {("server", NAME, "UNAVAILABLE"): 1, ("client", NAME, "UNAVAILABLE"): 1}


async def test_a_defect_is_counted_as_internal() -> None:
    found = await counted(ValueError("a defect"))
    assert found == {("server", NAME, "INTERNAL"): 1, ("client", NAME, "INTERNAL"): 1}


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/sluice.api.reward.v1.RewardService/Score", "RewardService/Score"),
        ("/Plain/Call", "Plain/Call"),
    ],
)
def test_methods_are_named_as_in_the_table_of_calls(path: str, short: str) -> None:
    assert short_method(path) == short


_RESET = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: Socket closed"


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "_run_has_no_tls", False)


@asynccontextmanager
async def _dying() -> AsyncIterator[str]:
    """The address of a listener that ends every connection, as a killed process does."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


async def _error_of_a_call() -> PeerError:
    async with _dying() as address:
        channel = open_channel(address, max_message_bytes=LIMIT_BYTES)
        async with channel:
            with pytest.raises(PeerError) as caught:
                await unary_call(
                    reward_stub(channel).GetStatus,
                    reward_pb2.GetStatusRequest(),
                    peer="rollout-1",
                    phase="asking",
                    deadline_s=60.0,
                )
    return caught.value


async def test_a_client_reads_that_the_run_may_have_tls() -> None:
    error = await _error_of_a_call()
    assert isinstance(error, HandshakeError)
    assert "compare sluice.security" in str(error)


async def test_a_service_of_a_run_without_tls_hears_of_a_killed_peer_and_not_of_tls() -> None:
    expect_no_tls()
    error = await _error_of_a_call()
    assert type(error) is PeerError
    assert str(error).startswith("rollout-1: failed while asking: UNAVAILABLE: ")
    assert "TLS" not in str(error)
    assert "sluice.security" not in str(error)


@pytest.mark.parametrize("details", [_RESET, "Ssl handshake failed", "WRONG_VERSION_NUMBER"])
def test_only_a_run_without_tls_has_no_remedy(details: str) -> None:
    assert handshake_remedy(details)
    expect_no_tls()
    assert handshake_remedy(details) == ""
