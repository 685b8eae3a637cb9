"""Answer health checks of unknown callers: one short request each, within seconds.

gRPC reads a whole request, up to the limit of all messages, before it calls a unary handler. So a
check is served as a stream of one message, whose bytes are read only here, against a clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

# ruff: noqa: ANN401 - gRPC does not type its handlers

LONGEST_CHECK_BYTES = 1024
MOST_OPEN_CHECKS = 64
_READ_WITHIN_S = 5.0


class BoundedChecks:
    """Limits for handlers of `Check`: no long requests, no slow ones, and not too many at once.

    When one more comes than may be open, the oldest ends. An honest check takes milliseconds, so
    callers that only keep requests open cannot keep others out.

    Args:
        most_open: requests that are read at once.
        read_within_s: seconds that a request may take to arrive.
    """

    def __init__(
        self, most_open: int = MOST_OPEN_CHECKS, read_within_s: float = _READ_WITHIN_S
    ) -> None:
        self._most_open = most_open
        self._read_within_s = read_within_s
        self._open: deque[asyncio.Timeout] = deque()

    def bounded(self, handler: Any) -> Any:
        """Return the unary handler `handler` with these limits."""

        async def check(requests: Any, context: Any) -> Any:
            data = await self._read(requests, context)
            if len(data) > LONGEST_CHECK_BYTES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"request: a health check of {len(data)} bytes; send at most "
                    f"{LONGEST_CHECK_BYTES}",
                )
            return await handler.unary_unary(handler.request_deserializer(data), context)

        return grpc.stream_unary_rpc_method_handler(
            check, response_serializer=handler.response_serializer
        )

    async def _read(self, requests: Any, context: Any) -> bytes:
        if len(self._open) >= self._most_open:
            self._open.popleft().reschedule(asyncio.get_running_loop().time())
        limit = asyncio.timeout(self._read_within_s)
        try:
            async with limit:
                self._open.append(limit)
                try:
                    return bytes(await anext(aiter(requests), b""))
                finally:
                    if limit in self._open:
                        self._open.remove(limit)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "request: this health check came too slowly, or too many came at once; ask again",
            )
            raise


class ChecksOnly(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped in grpc
    """A health service with `Check` but without `Watch`, whose callers could keep streams open.

    Args:
        health: the servicer that knows the answers.
    """

    def __init__(self, health: Any) -> None:
        self._health = health

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the state of one service, or of the whole server."""
        return await self._health.Check(request, context)
