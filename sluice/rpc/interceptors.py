"""The server interceptor that turns exceptions into status codes."""

# ruff: noqa: ANN401
from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from sluice.concurrency.exception_leaves import leaves
from sluice.errors import SluiceError
from sluice.rpc.error_tally import RPC_ERRORS, short_method
from sluice.rpc.malformed_request import checked, checked_stream, lenient
from sluice.rpc.status_codes import status_of

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]


async def _abort(context: Any, method: str, error: Exception) -> None:
    """Ends the call with the first error of ours; whatever else is in a group goes to the log."""
    inner = leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    known = next((e for e in inner if isinstance(e, SluiceError)), None)
    for unexpected in inner:
        if not isinstance(unexpected, SluiceError):
            kind = type(unexpected).__name__
            logger.error("%s: unexpected %s", method, kind, exc_info=unexpected)
    status = status_of(known) if known is not None else None
    code = grpc.StatusCode.INTERNAL if status is None else status.code
    RPC_ERRORS.add("server", short_method(method), code.name)
    if status is not None:
        await context.abort(*status)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error in {method}; see its log")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps domain errors through the table; anything else becomes an opaque INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _wrapped(handler, handler_call_details.method)


def _wrapped(handler: Any, method: str) -> Any:
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        build = (
            grpc.stream_stream_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        guard = _guard_stream if inspect.isasyncgenfunction(inner) else _guard_unary
        behaviour: Handler = guard(inner, method)
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        build = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        behaviour = _guard_unary(inner, method)
    return build(
        behaviour,
        request_deserializer=lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _checked(request: Any) -> Any:
    return checked_stream(request) if hasattr(request, "__aiter__") else checked(request)


def _guard_unary(inner: Handler, method: str) -> Handler:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await inner(_checked(request), context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            return await _abort(context, method, error)

    return guarded


def _guard_stream(inner: Handler, method: str) -> Handler:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(inner(_checked(request), context)) as messages:
                async for message in messages:
                    yield message
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            await _abort(context, method, error)

    return guarded
