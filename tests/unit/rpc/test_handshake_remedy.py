"""Who hears of TLS when a connection ends at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sluice.api.reward.v1 import reward_pb2
from sluice.errors import HandshakeError, PeerError
from sluice.rpc import status as remedies
from sluice.rpc.client import open_channel, reward_stub, unary_call
from sluice.rpc.status import expect_no_tls, handshake_remedy
from tests.support.rpc_server import LIMIT_BYTES

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
                    name="RewardService/GetStatus",
                    peer="rollout-1",
                    phase="asking",
                    deadline_s=10.0,
                )
    return caught.value


async def test_a_client_is_told_that_the_run_may_have_tls() -> None:
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
