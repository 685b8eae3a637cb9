"""The server interceptor that ends streams whose token has been taken out meanwhile."""

# ruff: noqa: ANN401
from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from sluice.errors import AccessDeniedError
from sluice.rpc.method_roles import is_allowed
from sluice.rpc.token_interceptor import presented_token
from sluice.security.token_file import TokenSource
from sluice.security.tokens import role_of

Check = Callable[[], None]


class OpenCallInterceptor(grpc.aio.ServerInterceptor):
    """Asks for the token again at each message of a stream, either way.

    It raises `AccessDeniedError`, so it stands behind the interceptor that makes statuses of
    errors. Calls of one message each way are left alone: their token was asked for a moment ago.

    Args:
        source: the tokens that are accepted.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or not (handler.request_streaming or handler.response_streaming):
            return handler
        presented = presented_token(handler_call_details.invocation_metadata) or ""
        method = handler_call_details.method

        def check() -> None:
            role = role_of(self._source.tokens(), presented)
            if role is None or not is_allowed(role, method):
                raise AccessDeniedError(
                    "the bearer token of this open call was taken out; call again with another"
                )

        return _checked(handler, check)


def _checked(handler: Any, check: Check) -> Any:
    inner = handler.stream_stream or handler.unary_stream or handler.stream_unary
    return handler._replace(
        **{
            kind: _checked_stream(inner, check)
            if inspect.isasyncgenfunction(inner)
            else _checked_call(inner, check)
            for kind in ("stream_stream", "unary_stream", "stream_unary")
            if getattr(handler, kind) is not None
        }
    )


def _checked_stream(inner: Callable[..., Any], check: Check) -> Callable[..., Any]:
    async def behaviour(request: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(inner(_checked_requests(request, check), context)) as messages:
            async for message in messages:
                check()
                yield message

    return behaviour


def _checked_call(inner: Callable[..., Any], check: Check) -> Callable[..., Any]:
    async def behaviour(request: Any, context: Any) -> Any:
        return await inner(_checked_requests(request, check), _CheckedContext(context, check))

    return behaviour


def _checked_requests(request: Any, check: Check) -> Any:
    return _each(request, check) if hasattr(request, "__aiter__") else request


async def _each(requests: AsyncIterator[Any], check: Check) -> AsyncIterator[Any]:
    async for request in requests:
        check()
        yield request


class _CheckedContext:
    """A call's context that checks before each message it writes."""

    def __init__(self, context: Any, check: Check) -> None:
        self._context, self._check = context, check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Writes one message."""
        self._check()
        await self._context.write(message)
