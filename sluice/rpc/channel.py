"""Client channels with limits and a keepalive that finds frozen peers."""

from __future__ import annotations

import grpc

from sluice.rpc.bearing_channel import BearingChannel
from sluice.rpc.credentials import OPEN, Credentials

_KEEPALIVE_MS = 10_000
_PING_TIMEOUT_MS = 5_000


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments that bound messages both ways."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def open_channel(
    address: str, *, max_message_bytes: int, credentials: Credentials = OPEN
) -> grpc.aio.Channel:
    """A channel to `address` (host:port). The caller closes it.

    `grpc.keepalive_timeout_ms` below a minute has no effect by itself; `ping_timeout_ms` is the
    timer that counts, so both are set.
    """
    options: list[tuple[str, int | str]] = [
        *message_limits(max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 200),
    ]
    channel = _connected(address, options, credentials)
    return channel if credentials.tokens is None else BearingChannel(channel, credentials.tokens)


def _connected(
    address: str, options: list[tuple[str, int | str]], credentials: Credentials
) -> grpc.aio.Channel:
    if not credentials.is_encrypted:
        return grpc.aio.insecure_channel(address, options=options)
    if credentials.server_name is not None:
        options = [*options, ("grpc.ssl_target_name_override", credentials.server_name)]
    return grpc.aio.secure_channel(address, credentials.for_channel(), options=options)
