"""The server interceptor that turns exceptions into statuses, and malformed requests into errors
of the caller.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from sluice.errors import InvalidRequestError, SluiceError, leaves
from sluice.rpc.status import RPC_ERRORS, short_method, status_of

Decoder = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class MalformedRequest:
    """A stand-in for bytes that are no message."""

    num_bytes: int
    reason: str


def lenient(decode: Decoder | None) -> Decoder | None:
    """Return a decoder that returns a `MalformedRequest` for bytes that `decode` refuses."""
    if decode is None:
        return None

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except (DecodeError, ValueError, RecursionError) as error:
            return MalformedRequest(len(data), str(error)[:200])

    return decoded


def checked(request: Any) -> Any:
    """Return the message. Raise InvalidRequestError if its bytes are none."""
    if isinstance(request, MalformedRequest):
        raise InvalidRequestError(
            f"request: its {request.num_bytes} bytes are no message of this method "
            f"({request.reason}); use the protocol files of the service's version"
        )
    return request


async def checked_stream(requests: Any) -> AsyncIterator[Any]:
    """Yield the messages, each as `checked`."""
    async for message in requests:
        yield checked(message)


# ruff: noqa: ANN401 - gRPC does not type its handlers

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]


async def _abort(context: Any, method: str, error: Exception) -> None:
    """End the call with the first error of ours. All other errors of a group go to the log."""
    # A caller can act on one error; a group of tasks may have raised several.
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
    """The mapping of domain errors through the table; other errors become an opaque INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
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
    # Malformed bytes must fail inside the guard, or gRPC would answer an opaque INTERNAL.
    return checked_stream(request) if hasattr(request, "__aiter__") else checked(request)


def _guard_unary(inner: Handler, method: str) -> Handler:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await inner(_checked(request), context)
        except (grpc.aio.AbortError, asyncio.CancelledError):  # the call has ended already
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
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):  # ended already
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            await _abort(context, method, error)

    return guarded
