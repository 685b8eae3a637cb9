"""Spans as they arrive somewhere: in a file, at a collector, or in this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from sluice.telemetry.otel import OtelRecorder
from sluice.telemetry.tracing import TRACER, TraceContext


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """One span, with its ids in hexadecimal digits; `parent` is empty without one."""

    name: str
    trace: str
    id: str
    parent: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    error: str | None


def spans_in(path: Path) -> list[ReadSpan]:
    """All spans of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [span for line in lines for span in _spans_of(json.loads(line))]


def _spans_of(batch: dict[str, Any]) -> Iterator[ReadSpan]:
    for resource in batch["resourceSpans"]:
        service = _attributes(resource["resource"])["service.name"]
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield ReadSpan(
                    span["name"],
                    span["traceId"],
                    span["spanId"],
                    span.get("parentSpanId", ""),
                    service,
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                    _attributes(span),
                    tuple((link["traceId"], link["spanId"]) for link in span.get("links", ())),
                    span.get("status", {}).get("message"),
                )


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: _value(one["value"]) for one in owner["attributes"]}


def _value(value: dict[str, Any]) -> Any:
    ((kind, given),) = value.items()
    return int(given) if kind == "intValue" else given


def tree(spans: Iterable[ReadSpan]) -> dict[str, set[str]]:
    """Names of the spans of one trace, each with the names of its parents."""
    spans = list(spans)
    names = {span.id: span.name for span in spans}
    found: dict[str, set[str]] = {}
    for span in spans:
        found.setdefault(span.name, set()).add(names.get(span.parent, span.parent))
    return found


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """A span that ended in this process."""

    name: str
    context: TraceContext
    parent_id: int | None
    start_ns: int
    duration_ns: int
    attributes: dict[str, Any]
    links: tuple[TraceContext, ...]
    error: str | None


class Kept(SpanProcessor):
    """Keeps what ended; `begun` counts all that began, `ended` has the SDK's spans."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []
        self.begun = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Counts it."""
        self.begun += 1

    def on_end(self, span: ReadableSpan) -> None:
        """Keeps it."""
        self.ended.append(span)

    @property
    def spans(self) -> list[KeptSpan]:
        """All spans, in the order of their ends."""
        return [_kept(span) for span in self.ended]

    def named(self, name: str) -> list[KeptSpan]:
        """Those of one name."""
        return [span for span in self.spans if span.name == name]


def _kept(span: ReadableSpan) -> KeptSpan:
    assert span.start_time is not None
    assert span.end_time is not None
    return KeptSpan(
        span.name,
        _context(span.context),
        span.parent.span_id if span.parent else None,
        span.start_time,
        span.end_time - span.start_time,
        dict(span.attributes or {}),
        tuple(_context(link.context) for link in span.links),
        None if span.status.is_ok else span.status.description,
    )


def _context(context: Any) -> TraceContext:
    return TraceContext(context.trace_id, context.span_id, is_sampled=True)


@contextmanager
def traced(ratio: float = 1.0, *, follows_callers: bool = True) -> Iterator[Kept]:
    """This process is traced inside."""
    kept = Kept()
    TRACER.start(OtelRecorder({}, [kept]), ratio, follows_callers=follows_callers)
    try:
        yield kept
    finally:
        TRACER.stop()


@dataclass
class Collector:
    """A collector that keeps requests; `address` is where it listens."""

    address: str
    requests: list[Any] = field(default_factory=list)

    def spans(self) -> Sequence[Any]:
        """All spans that came, as OTLP's messages."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextmanager
def collector() -> Iterator[Collector]:
    """OpenTelemetry's TraceService in this process; needs its protobuf package."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    class TraceService(service.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            found.requests.append(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    service.add_TraceServiceServicer_to_server(TraceService(), server)
    found = Collector(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()
