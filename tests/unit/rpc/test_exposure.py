"""Which servers other machines may reach, and what is said of those."""

from __future__ import annotations

import logging
import re

import pytest

from sluice.config.addresses import is_loopback
from sluice.rpc.credentials import OPEN, Credentials, exposure
from sluice.rpc.server import RpcServer
from tests.support.certified import ACCEPTED, mutual, service_key
from tests.support.rpc_server import LIMIT_BYTES

EVERYWHERE = "0.0.0.0"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "[::1]"])
def test_loopback_is_known_by_address_and_by_name(host: str) -> None:
    assert is_loopback(host)
    assert exposure(host, OPEN) is None


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "[::]", "192.0.2.7", "no-such-host.invalid"])
def test_everything_else_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("credentials", "reported"),
    [
        (OPEN, "can then steer the run .* set sluice.security.tls=mtls or sluice.security"),
        (Credentials(is_encrypted=True), "can then steer the run"),
        (Credentials(tokens=ACCEPTED), "tokens and data travel unencrypted; set sluice.security"),
        (Credentials(is_encrypted=True, asks_certificate=True), None),
        (Credentials(is_encrypted=True, tokens=ACCEPTED), None),
    ],
    ids=["open", "tls only", "token only", "mtls", "tls and token"],
)
def test_what_is_missing_is_told_with_its_remedy(
    credentials: Credentials, reported: str | None
) -> None:
    found = exposure(EVERYWHERE, credentials)
    if reported is None:
        assert found is None
    else:
        assert re.search(reported, found or "")


@pytest.mark.parametrize(("secured", "num_warnings"), [(False, 1), (True, 0)])
async def test_a_server_open_to_other_machines_warns_once_at_its_start(
    secured: bool, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = mutual(service_key()) if secured else OPEN
    server = RpcServer(
        [], [], host=EVERYWHERE, port=0, max_message_bytes=LIMIT_BYTES, credentials=credentials
    )
    await server.start()
    await server.stop(0)
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == num_warnings
