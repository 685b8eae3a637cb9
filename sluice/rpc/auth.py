"""Authorize calls: bearer tokens, roles of methods, tokens revoked during a stream, quotas of
clients. Health checks need no token, so they are bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from sluice.errors import AccessDeniedError, ExhaustedError, InvalidRequestError
from sluice.rpc.metadata import presented_token
from sluice.rpc.status import CLASS_KEY, QUOTA_REFUSALS, RPC_ERRORS
from sluice.security.token_file import Role, TokenSource, role_of

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
HEALTH_CHECK = f"{_HEALTH_PREFIX}Check"

# Clients may generate, submit, score and look. They may not control the run, take its batches or
# replace its weights.
CLIENT_METHODS = frozenset(
    {
        "/sluice.api.rollout.v1.RolloutService/Generate",
        "/sluice.api.rollout.v1.RolloutService/GetStatus",
        "/sluice.api.reward.v1.RewardService/SubmitPrompts",
        "/sluice.api.reward.v1.RewardService/Score",
        "/sluice.api.reward.v1.RewardService/LeaseSamples",
        "/sluice.api.reward.v1.RewardService/Chat",
        "/sluice.api.reward.v1.RewardService/EndEpisode",
        "/sluice.api.reward.v1.RewardService/GetStatus",
        "/sluice.api.trainer.v1.TrainerService/GetStatus",
        "/sluice.api.trainer.v1.TrainerService/WatchSteps",
    }
)
_REFLECTION_PREFIX = "/grpc.reflection."

_REMEDY = "set sluice.security.token_file, or SLUICE_TOKEN, to one that this service accepts"
LONGEST_CHECK_BYTES = 1024
MAX_OPEN_CHECKS = 64
_READ_WITHIN_S = 5.0


def is_allowed(role: Role, method: str) -> bool:
    """Return whether a caller of that role may use the method."""
    if role is Role.SERVICE:
        return True
    return method in CLIENT_METHODS or method.startswith((_REFLECTION_PREFIX, _HEALTH_PREFIX))


# ruff: noqa: ANN401 - gRPC does not type its handlers


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Checks the caller's token.

    Without a valid token the answer is UNAUTHENTICATED, for a lesser role PERMISSION_DENIED.
    Methods that do not exist get the same answers, so that a stranger cannot find out what is
    served.

    Args:
        source: the accepted tokens.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self._checks = BoundedChecks()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass the call on, or refuse it before its request is read."""
        method = handler_call_details.method
        if method == HEALTH_CHECK:
            handler = await continuation(handler_call_details)
            return None if handler is None else self._checks.limit(handler)
        presented = presented_token(handler_call_details.invocation_metadata)
        if presented is None:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, f"no bearer token came; {_REMEDY}")
        role = role_of(self._source.tokens(), presented)
        if role is None:
            return _refusal(
                grpc.StatusCode.UNAUTHENTICATED, f"the bearer token is unknown; {_REMEDY}"
            )
        if not is_allowed(role, method):
            return _refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"a token of the role {role} may not call {method}; use one of the role service",
            )
        return await continuation(handler_call_details)

    def open_call_check(self, details: grpc.HandlerCallDetails) -> Callable[[], None]:
        """Return a check of the same token again, for each message of a stream.

        The check raises AccessDeniedError once the token is not valid any more.
        """
        # Without a token the call was refused before, unless the method is open to all.
        presented = presented_token(details.invocation_metadata) or ""

        def check() -> None:
            role = role_of(self._source.tokens(), presented)
            if role is None or not is_allowed(role, details.method):
                raise AccessDeniedError(
                    "the bearer token of this open call was taken out; call again with another"
                )

        return check


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    RPC_ERRORS.add("server", "any", code.name)  # the method may be any text

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(code, details, ((CLASS_KEY, AccessDeniedError.__name__),))

    # A stream handler without deserializers fits both unary and streaming callers.
    return grpc.stream_stream_rpc_method_handler(refuse)


class BoundedChecks:
    """Limits health checks: no long requests, no slow ones, and not too many at once.

    gRPC reads a whole request, up to the limit of all messages, before it calls a unary handler. So
    a check is served as a stream of one message, whose bytes are read only here, against a clock.

    If too many are open, the oldest ends. A normal check takes milliseconds, so callers that keep
    requests open cannot keep others out.
    """

    def __init__(self) -> None:
        self._open: deque[asyncio.Timeout] = deque()

    def limit(self, handler: Any) -> Any:
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
        if len(self._open) >= MAX_OPEN_CHECKS:
            oldest = self._open.popleft()
            if not oldest.expired():  # otherwise it ends as soon as its task runs
                oldest.reschedule(asyncio.get_running_loop().time())
        limit = asyncio.timeout(_READ_WITHIN_S)
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


class ClientQuota:
    """Counts the units in use by each client, up to a limit. Used from one event loop.

    Args:
        limit: units that one client may have at once.
        unit: the plural name of a unit, for errors.
        key: the setting that defines `limit`, for errors.
    """

    def __init__(self, limit: int, unit: str, key: str) -> None:
        self._limit = limit
        self._unit = unit
        self._key = key
        self._held: dict[str, int] = {}

    def in_use(self, client: str | None) -> int:
        """Return the units that a client has."""
        return self._held.get(client, 0) if client is not None else 0

    @contextmanager
    def hold(self, client: str | None, amount: int) -> Iterator[None]:
        """Count `amount` units as in use during the block. Without a client nothing is counted.

        Raises:
            ExhaustedError: the client would have too many; the error names it and the setting.
            InvalidRequestError: no client may have as many, so waiting does not help.
        """
        if client is None or not amount:
            yield
            return
        before = self.in_use(client)
        # Waiting never frees so many, so a retry cannot help.
        if amount > self._limit:
            QUOTA_REFUSALS.add(self._key)
            raise InvalidRequestError(
                f"client {client!r}: {amount} {self._unit} were requested at once; {self._key} "
                f"allows {self._limit}: request fewer, or raise it"
            )
        if before + amount > self._limit:
            QUOTA_REFUSALS.add(self._key)
            raise ExhaustedError(
                f"client {client!r}: {before} {self._unit} are under way and {amount} more were "
                f"requested; {self._key} allows {self._limit}: wait for some to end"
            )
        self._held[client] = before + amount
        try:
            yield
        finally:
            self._held[client] -= amount
            # Names of clients are arbitrary, so idle ones must not stay in memory.
            if not self._held[client]:
                del self._held[client]
