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

from sluice.telemetry.tracing import TRACER, RecordedSpan


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


@dataclass
class Kept:
    """A sink that keeps what ended; `begun` counts all that began."""

    spans: list[RecordedSpan] = field(default_factory=list)
    begun: int = 0

    def put(self, span: RecordedSpan) -> None:
        """Keeps it."""
        self.spans.append(span)

    def named(self, name: str) -> list[RecordedSpan]:
        """Those of one name."""
        return [span for span in self.spans if span.name == name]


@contextmanager
def traced(ratio: float = 1.0, *, follows_callers: bool = True) -> Iterator[Kept]:
    """This process is traced inside."""
    kept, begin = Kept(), RecordedSpan.__init__

    def counted(span: RecordedSpan, *arguments: Any) -> None:
        kept.begun += 1
        begin(span, *arguments)

    RecordedSpan.__init__ = counted  # type: ignore[method-assign]
    TRACER.start([kept], ratio, follows_callers=follows_callers)
    try:
        yield kept
    finally:
        TRACER.stop()
        RecordedSpan.__init__ = begin  # type: ignore[method-assign]


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
