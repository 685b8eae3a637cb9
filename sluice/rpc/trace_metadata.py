"""Trace context in the metadata of calls: W3C's `traceparent`, both ways.

By hand, for the calls that a trace is about: interceptors around every call would cost more than
the spans, also where nothing is recorded.
"""

from __future__ import annotations

from typing import Any, Protocol

from sluice.telemetry.span_names import SpanKind, SpanName
from sluice.telemetry.trace_context import TraceContext, parse_traceparent
from sluice.telemetry.tracing import NOTHING, TRACER, Span

TRACEPARENT = "traceparent"
_NO_OPTIONS: dict[str, Any] = {}


class ServedCall(Protocol):
    """What is read of a servicer's context."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        """Pairs of key and value."""
        ...


def call_options() -> dict[str, Any]:
    """Further arguments of a stub's method, so that the peer goes on with the present span."""
    context = TRACER.current()
    return _NO_OPTIONS if context is None else {"metadata": ((TRACEPARENT, context.traceparent),)}


def caller_context(call: ServedCall) -> TraceContext | None:
    """The span of a caller from outside, recorded as far as this process admits it.

    Returns:
        ``None`` if it sent none, or nothing is traced here.
    """
    context = _sent_context(call)
    return None if context is None else TRACER.admitted(context)


def served(name: SpanName, call: ServedCall) -> Span:
    """The span of a call that is served: in the caller's trace, or in one of its own."""
    if not TRACER.is_on:
        return NOTHING
    # Others than the reward service generate too; what it chose itself is chosen here as well.
    context = caller_context(call) if name is SpanName.SERVE else _sent_context(call)
    return TRACER.trace(name, caller=context, kind=SpanKind.SERVER)


def _sent_context(call: ServedCall) -> TraceContext | None:
    if not TRACER.is_on:
        return None
    metadata = call.invocation_metadata() or ()
    return next((parse_traceparent(value) for key, value in metadata if key == TRACEPARENT), None)
