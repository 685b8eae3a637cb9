"""Calls to peers: deadline and retries from the table, errors from our own tree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import grpc

from sluice.concurrency.waits import waiting_for
from sluice.errors import SluiceError
from sluice.rpc.call_policy import CALL_POLICIES
from sluice.rpc.error_tally import RPC_ERRORS
from sluice.rpc.status_codes import CLASS_KEY, error_of
from sluice.rpc.trace_metadata import call_options

RequestT = TypeVar("RequestT", contravariant=True)
ResponseT = TypeVar("ResponseT", covariant=True)


class UnaryMethod(Protocol[RequestT, ResponseT]):
    """A stub's unary method."""

    def __call__(
        self,
        request: RequestT,
        /,
        *,
        timeout: float | None = None,
        metadata: tuple[tuple[str, str], ...] | None = None,
    ) -> Awaitable[ResponseT]:
        """Starts the call."""
        ...


class _StreamCall(Protocol[ResponseT]):
    def __aiter__(self) -> AsyncIterator[ResponseT]: ...
    def cancel(self) -> bool: ...


async def unary_call(
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
    *,
    name: str,
    peer: str,
    phase: str,
    deadline_s: float | None = None,
) -> ResponseT:
    """Calls a unary method.

    Args:
        method: the stub's method.
        request: the message.
        name: ``Service/Method``, a key of `CALL_POLICIES`.
        peer: who is called, for errors.
        phase: what for, for errors ("taking a batch").
        deadline_s: seconds per attempt; none: the table's.

    Raises:
        SluiceError: as mapped by `sluice.rpc.status_codes`.
    """
    policy = CALL_POLICIES[name]
    seconds = policy.deadline_s if deadline_s is None else deadline_s
    for attempt in range(policy.attempts):
        try:
            with waiting_for(peer, phase):
                return await method(request, timeout=seconds, **call_options())
        except grpc.aio.AioRpcError as error:
            RPC_ERRORS.add("client", name, error.code().name)
            last = attempt + 1 == policy.attempts
            if last or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise _translated(error, peer, phase, seconds) from error
        await asyncio.sleep(policy.backoff_s * 2**attempt)
    raise AssertionError("a policy has at least one attempt")


async def stream_call(
    method: Callable[..., _StreamCall[ResponseT]],
    request: object,
    *,
    name: str,
    peer: str,
    phase: str,
    deadline_s: float | None = None,
) -> AsyncGenerator[ResponseT, None]:
    """Calls a server-streaming method and yields its messages; leaving early cancels the call.

    Consume it inside `contextlib.aclosing`. Arguments and errors as for `unary_call`; streams are
    never retried.
    """
    seconds = CALL_POLICIES[name].deadline_s if deadline_s is None else deadline_s
    call = method(request, timeout=seconds, **call_options())
    try:
        with waiting_for(peer, phase) as wait:
            async for message in call:
                wait.restart()
                yield message
                wait.restart()
    except grpc.aio.AioRpcError as error:
        RPC_ERRORS.add("client", name, error.code().name)
        raise _translated(error, peer, phase, seconds) from error
    finally:
        call.cancel()


def _translated(
    error: grpc.aio.AioRpcError, peer: str, phase: str, deadline_s: float
) -> SluiceError:
    metadata = error.trailing_metadata()
    name = metadata.get(CLASS_KEY) if metadata is not None else None
    return error_of(
        error.code(),
        error.details() or "",
        name if isinstance(name, str) else None,
        peer=peer,
        phase=phase,
        deadline_s=deadline_s,
    )
