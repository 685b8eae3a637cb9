"""Metadata of calls: who calls, as quotas count it, and the trace context (W3C's `traceparent`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from sluice.rpc.auth import presented_token
from sluice.security.token_file import Role, TokenSource, role_of
from sluice.telemetry.tracing import (
    NOTHING,
    TRACER,
    Span,
    SpanKind,
    SpanName,
    TraceContext,
    parse_traceparent,
)

CLIENT_KEY = "sluice-client"
"""Metadata key of the name that a client gives itself."""
SERVICE_KEY = "sluice-service"
"""Metadata key under which a service of the run says that it is one."""
MAX_NAME_LENGTH = 128

ResultT = TypeVar("ResultT", covariant=True)


class ServedCall(Protocol):
    """What is read of a servicer's context."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        """Pairs of key and value."""
        ...

    def peer(self) -> str:
        """The other end's address, as gRPC writes it."""
        ...


def caller_of(call: ServedCall, tokens: TokenSource | None) -> str | None:
    """`caller_name` of a call that is served."""
    return caller_name(call.invocation_metadata(), tokens, call.peer())


def caller_name(metadata: Any, tokens: TokenSource | None, peer: str) -> str | None:  # noqa: ANN401
    """The client that a call counts for; none: a service of the run, which has no quota.

    A token of the role client names its holder, whatever else the call says, so that nobody gets
    more by changing names. Without tokens, and for services, the name under `CLIENT_KEY` counts.
    Without tokens, all calls of one host that give no name count for one client, but for those that
    say under `SERVICE_KEY` that they are a service's.

    Args:
        metadata: pairs of key and value, as gRPC gives them.
        tokens: that the service accepts; none: it asks for none.
        peer: the caller's address as gRPC writes it, such as ``ipv4:10.0.0.7:4711``.
    """
    presented = presented_token(metadata) if tokens is not None else None
    if tokens is not None and presented is not None:
        is_client = role_of(tokens.tokens(), presented) is Role.CLIENT
        if is_client:
            digest = hashlib.blake2b(presented.encode(errors="surrogateescape"), digest_size=4)
            return f"token {digest.hexdigest()}"
    name = _header(metadata, CLIENT_KEY)
    if name or tokens is not None:
        return name[:MAX_NAME_LENGTH] or None
    return None if _header(metadata, SERVICE_KEY) else f"host {host_of(peer)}"


def is_service_of_run(call: ServedCall, tokens: TokenSource | None) -> bool:
    """Whether a service of the run makes a call that is served; it books what it gets.

    All services say so under `SERVICE_KEY`; a client is none, whatever it says.
    """
    metadata = call.invocation_metadata()
    return bool(_header(metadata, SERVICE_KEY)) and caller_of(call, tokens) is None


def host_of(peer: str) -> str:
    """The host of an address as gRPC writes it; the whole where there is none, as of a socket file.

    ``ipv4:10.0.0.7:4711`` gives ``10.0.0.7``; ``ipv6:%5B::1%5D:4711`` gives ``::1``.
    """
    found = re.fullmatch(r"ipv[46]:(?:\[(.+)\]|(.+)):\d+", unquote(peer))
    return (found[1] or found[2]) if found else peer


def as_service(method: Callable[..., ResultT], service: str) -> Callable[..., ResultT]:
    """A stub's method that says with each call which service of the run makes it."""

    def call(
        request: object, *, metadata: tuple[tuple[str, str], ...] = (), timeout: float | None = None
    ) -> ResultT:
        return method(request, timeout=timeout, metadata=(*metadata, (SERVICE_KEY, service)))

    return call


def _header(metadata: Any, key: str) -> str:  # noqa: ANN401
    values = [value for reported, value in metadata or () if reported == key]
    return values[0] if values and isinstance(values[0], str) else ""


# Trace context in the metadata of calls: W3C's `traceparent`, both ways.
#
# By hand, for the calls that a trace is about: interceptors around every call would cost more
# than the spans, also where nothing is recorded.

TRACEPARENT = "traceparent"
_NO_OPTIONS: dict[str, Any] = {}


class TracedCall(Protocol):
    """What is read of a servicer's context."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        """Pairs of key and value."""
        ...


def call_options() -> dict[str, Any]:
    """Further arguments of a stub's method, so that the peer goes on with the present span."""
    context = TRACER.current()
    return _NO_OPTIONS if context is None else {"metadata": ((TRACEPARENT, context.traceparent),)}


def caller_context(call: TracedCall) -> TraceContext | None:
    """The span of a caller from outside, recorded as far as this process admits it.

    Returns:
        ``None`` if it sent none, or nothing is traced here.
    """
    context = _sent_context(call)
    return None if context is None else TRACER.admitted(context)


def served(name: SpanName, call: TracedCall) -> Span:
    """The span of a call that is served: in the caller's trace, or in one of its own."""
    if not TRACER.is_on:
        return NOTHING
    # Others than the reward service generate too; what it chose itself is chosen here as well.
    context = caller_context(call) if name is SpanName.SERVE else _sent_context(call)
    return TRACER.trace(name, caller=context, kind=SpanKind.SERVER)


def _sent_context(call: TracedCall) -> TraceContext | None:
    if not TRACER.is_on:
        return None
    metadata = call.invocation_metadata() or ()
    return next((parse_traceparent(value) for key, value in metadata if key == TRACEPARENT), None)
