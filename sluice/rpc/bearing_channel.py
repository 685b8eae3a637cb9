"""A channel whose every call bears the token that counts at that moment.

gRPC's own call credentials work only over TLS, and its client interceptors wrap the call objects;
this adds one header and passes on what the channel returns.
"""

# ruff: noqa: ANN401
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import grpc

from sluice.rpc.token_interceptor import AUTHORIZATION
from sluice.security.token_file import TokenSource


class BearingChannel(grpc.aio.Channel):
    """A channel that presents a token. The caller closes it.

    Args:
        channel: does the work; closed with this one.
        source: the token that is presented is its first.
    """

    def __init__(self, channel: grpc.aio.Channel, source: TokenSource) -> None:
        self._channel, self._source = channel, source

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The connection's state."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for another state."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for a connection."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """A method with a token on each call."""
        return self._bearing(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """A method with a token on each call."""
        return self._bearing(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """A method with a token on each call."""
        return self._bearing(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """A method with a token on each call."""
        return self._bearing(self._channel.stream_stream(*arguments, **options))

    def _bearing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **options: Any) -> Any:
            token = (AUTHORIZATION, f"Bearer {self._source.tokens()[0].secret}")
            return method(*arguments, metadata=(*(metadata or ()), token), **options)

        return call
