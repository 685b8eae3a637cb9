"""The server interceptor that turns exceptions into statuses, malformed requests into errors of the
caller, and ends open streams whose token is not valid any more.
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

logger = logging.getLogger(__name__)

# ruff: noqa: ANN401 - gRPC does not type its handlers

Check = Callable[[], None]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The mapping of domain errors through the table; other errors become an opaque INTERNAL.

    Args:
        check_of: returns the check of one call, which each message of its streams must pass.
    """

    def __init__(
        self, check_of: Callable[[grpc.HandlerCallDetails], Check] = lambda _call: lambda: None
    ) -> None:
        self._check_of = check_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        requests = "stream" if handler.request_streaming else "unary"
        responses = "stream" if handler.response_streaming else "unary"
        kind = f"{requests}_{responses}"
        call = _GuardedCall(
            getattr(handler, kind),
            handler_call_details.method,
            self._check_of(handler_call_details),
        )
        is_generator = inspect.isasyncgenfunction(call.inner)
        return handler._replace(
            request_deserializer=_lenient(handler.request_deserializer),
            **{kind: call.stream if is_generator else call.answer},
        )


@dataclass(frozen=True, slots=True)
class _GuardedCall:
    """A method whose errors become statuses."""

    inner: Callable[..., Any]
    method: str
    check: Check

    async def answer(self, request: Any, context: Any) -> Any:
        """Return the answer of a coroutine, which may also write messages to the context."""
        try:
            return await self.inner(self._checked(request), _CheckedContext(context, self.check))
        except (grpc.aio.AbortError, asyncio.CancelledError):  # the call has ended already
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            return await _abort(context, self.method, error)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the messages of an asynchronous generator."""
        try:
            async with aclosing(self.inner(self._checked(request), context)) as messages:
                async for message in messages:
                    self.check()
                    yield message
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):  # ended already
            raise
        except Exception as error:  # noqa: BLE001  the boundary where errors become statuses
            await _abort(context, self.method, error)

    def _checked(self, request: Any) -> Any:
        # Malformed bytes must fail inside the guard, or gRPC would answer an opaque INTERNAL.
        return self._each(request) if hasattr(request, "__aiter__") else _whole(request)

    async def _each(self, requests: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.check()
            yield _whole(request)


class _CheckedContext:
    """A call's context that checks the token before each message it writes."""

    def __init__(self, context: Any, check: Check) -> None:
        self._context = context
        self._check = check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._check()
        await self._context.write(message)


@dataclass(frozen=True, slots=True)
class _MalformedRequest:
    """A stand-in for bytes that are no message."""

    num_bytes: int
    reason: str


def _lenient(decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a decoder that returns a `_MalformedRequest` for bytes that `decode` refuses."""
    if decode is None:
        return None

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except (DecodeError, ValueError, RecursionError) as error:
            return _MalformedRequest(len(data), str(error)[:200])

    return decoded


def _whole(request: Any) -> Any:
    """Return the message. Raise InvalidRequestError if its bytes are none."""
    if isinstance(request, _MalformedRequest):
        raise InvalidRequestError(
            f"request: its {request.num_bytes} bytes are no message of this method "
            f"({request.reason}); use the protocol files of the service's version"
        )
    return request


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
