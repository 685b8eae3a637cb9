"""Client channels with limits and a keepalive that finds frozen peers."""

from __future__ import annotations

import grpc

_KEEPALIVE_MS = 10_000
_PING_TIMEOUT_MS = 5_000


def message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments that bound messages both ways."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def open_channel(address: str, *, max_message_bytes: int) -> grpc.aio.Channel:
    """A channel to `address` (host:port). The caller closes it.

    `grpc.keepalive_timeout_ms` below a minute has no effect by itself; `ping_timeout_ms` is the
    timer that counts, so both are set.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[
            *message_limits(max_message_bytes),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.initial_reconnect_backoff_ms", 200),
        ],
    )
