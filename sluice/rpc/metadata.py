"""Metadata of calls: the bearer token, the caller's identity for quotas, and the trace context."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Protocol
from urllib.parse import unquote

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

AUTHORIZATION = "authorization"
CLIENT_KEY = "sluice-client"
"""Metadata key of the name that a client gives itself."""
SERVICE_KEY = "sluice-service"
"""Metadata key for the name of a service of the run."""
TRACEPARENT = "traceparent"
"""Metadata key of the trace context, as W3C names the header."""
MAX_NAME_LENGTH = 128
_SCHEME = "bearer "
_NO_OPTIONS: dict[str, Any] = {}

# ruff: noqa: ANN401 - gRPC does not type its metadata


class ServedCall(Protocol):
    """The part of a servicer's context that identifies the caller and holds the trace."""

    def invocation_metadata(self) -> Any:
        """Return pairs of key and value."""
        ...

    def peer(self) -> str:
        """Return the other end's address, as gRPC writes it."""
        ...


def presented_token(metadata: Any) -> str | None:
    """Return the bearer token in a call's metadata; None without one."""
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip()
    return None


def caller_of(call: ServedCall, tokens: TokenSource | None) -> str | None:
    """Return the client that a call counts for; None for a service of the run, which has no quota.

    A token of the role client identifies its holder, so that no client gets more by changing its
    name. Without tokens, and for services, the name under `CLIENT_KEY` counts. Without tokens, all
    calls of one host without a name count for one client, except a service's calls, which carry a
    name under `SERVICE_KEY`.

    Args:
        call: served here.
        tokens: the tokens that the service accepts; None if it needs none.
    """
    metadata = call.invocation_metadata()
    presented = presented_token(metadata) if tokens is not None else None
    if tokens is not None and presented is not None:
        is_client = role_of(tokens.tokens(), presented) is Role.CLIENT
        if is_client:
            # Logs and errors show the name, so it must not reveal the token.
            digest = hashlib.blake2b(presented.encode(errors="surrogateescape"), digest_size=4)
            return f"token {digest.hexdigest()}"
    name = _header(metadata, CLIENT_KEY)
    if name or tokens is not None:
        return name[:MAX_NAME_LENGTH] or None
    return None if _header(metadata, SERVICE_KEY) else f"host {host_of(call.peer())}"


def is_service_of_run(call: ServedCall, tokens: TokenSource | None) -> bool:
    """Return whether a served call comes from a service of the run, which accounts for tokens
    itself.

    All services give a name under `SERVICE_KEY`; a client that does so stays a client.
    """
    metadata = call.invocation_metadata()
    return bool(_header(metadata, SERVICE_KEY)) and caller_of(call, tokens) is None


def host_of(peer: str) -> str:
    """Return the host of an address as gRPC writes it, or the whole address of a socket file.

    ``ipv4:10.0.0.7:4711`` gives ``10.0.0.7``; ``ipv6:%5B::1%5D:4711`` gives ``::1``.
    """
    match = re.fullmatch(r"ipv[46]:(?:\[(.+)\]|(.+)):\d+", unquote(peer))
    return (match[1] or match[2]) if match else peer


def _header(metadata: Any, key: str) -> str:
    values = [value for reported, value in metadata or () if reported == key]
    return values[0] if values and isinstance(values[0], str) else ""


def call_options(traceparent: str = "") -> dict[str, Any]:
    """Return arguments of a stub's method that make the peer continue a span.

    Calls pass and read the trace context themselves: interceptors around every call would cost
    more than the spans, even where nothing is recorded.

    Args:
        traceparent: the span; empty for the current one, if any.
    """
    if not traceparent:
        context = TRACER.current()
        if context is None:
            return _NO_OPTIONS
        traceparent = context.traceparent
    return {"metadata": ((TRACEPARENT, traceparent),)}


def caller_context(call: ServedCall) -> TraceContext | None:
    """Return the span of an outside caller, recorded if this process admits it.

    Returns:
        ``None`` if the caller sent none, or nothing is traced here.
    """
    context = _sent_context(call)
    return None if context is None else TRACER.admit(context)


def served_span(name: SpanName, call: ServedCall) -> Span:
    """Return the span of a served call, in the caller's trace or in a new one."""
    if not TRACER.is_on:
        return NOTHING
    # Generate calls also come from clients, which this process admits; the reward service has
    # chosen its traces already.
    context = caller_context(call) if name is SpanName.SERVE else _sent_context(call)
    return TRACER.trace(name, caller=context, kind=SpanKind.SERVER)


def _sent_context(call: ServedCall) -> TraceContext | None:
    if not TRACER.is_on:
        return None
    metadata = call.invocation_metadata() or ()
    return next((parse_traceparent(value) for key, value in metadata if key == TRACEPARENT), None)
