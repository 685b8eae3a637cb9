"""Record spans with OpenTelemetry's SDK, and write them to a file or send them to a collector.

The SDK's exporter handles connection, TLS, compression and retries. It reads variables such as
``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE`` and ``_COMPRESSION``; no keys of ours repeat them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from sluice.concurrency.threads import BoundedWriter, WriteError
from sluice.errors import ConfigError
from sluice.telemetry.metrics import SPANS, SpanOutcome, TelemetryPart, charge_cpu
from sluice.telemetry.tracing import (
    SPAN_BITS,
    Attributes,
    RecordedSpan,
    SpanKind,
    SpanName,
    Timestamp,
    TraceContext,
    new_id,
)

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
except ImportError as missing:
    raise ConfigError(
        f"sluice.telemetry.traces: OpenTelemetry's SDK cannot be imported ({missing}); install it "
        "with pip install 'sluice[traces]', or take sluice.telemetry.traces.file and "
        "sluice.telemetry.traces.endpoint out"
    ) from missing

EXPORT_TIMEOUT_S = 20
"""Seconds that a batch to a collector may take, retries included: a busy one may stand still."""
MAX_QUEUED_SPANS = 16_384
"""Spans that wait at most for each destination, about 1 kB each."""
BATCH = 512
INTERVAL_S = 1.0
_SCOPE = "sluice"
_MAX_ERROR_CHARS = 500
# A step links to every prompt of its batch; the SDK's own limit is 128.
_LIMITS = SpanLimits(max_links=1 << 20)
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_first_of_trace: ContextVar[int] = ContextVar("trace id", default=0)


class _Ids(IdGenerator):
    """Ids from a generator that runs do not seed; a trace's id is chosen before its first span."""

    def generate_span_id(self) -> int:
        return new_id(SPAN_BITS)

    def generate_trace_id(self) -> int:
        return _first_of_trace.get()


class OtelSpan(RecordedSpan):
    """A span of the SDK. Its duration is measured by the monotonic clock."""

    __slots__ = ("_began", "_ended_ns", "_kind", "_name", "_recorder", "_span")

    def __init__(
        self, recorder: OtelRecorder, span: trace.Span, name: str, kind: SpanKind, began: Timestamp
    ) -> None:
        context = span.get_span_context()
        super().__init__(TraceContext(context.trace_id, context.span_id, is_sampled=True))
        self._recorder = recorder
        self._span = span
        self._name = name
        self._kind = kind
        self._began = began
        self._ended_ns: int | None = None

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def link(self, contexts: Sequence[TraceContext]) -> None:
        for context in contexts:
            self._span.add_link(_span_context(context))

    def fail(self, error: str | None) -> None:
        if error is not None:
            self._span.set_status(trace.StatusCode.ERROR, error[:_MAX_ERROR_CHARS])

    def end(self) -> None:
        if self._ended_ns is None:
            lasted_ns = time.monotonic_ns() - self._began.monotonic_ns
            self._ended_ns = self._began.wall_ns + lasted_ns
            self._span.end(self._ended_ns)

    def again_under(self, parent: TraceContext, attributes: Attributes) -> None:
        copy = self._recorder.begin(
            SpanName(self._name), parent, self._kind, attributes, began=self._began
        )
        copy.link([self.context])
        status = getattr(self._span, "status", None)
        copy.fail(status.description if status is not None else None)
        copy._span.end(self._ended_ns)


class OtelRecorder:
    """The SDK's tracer. `sluice.telemetry.tracing` chooses the recorded traces before that.

    Args:
        resource: attributes of this process; ``OTEL_RESOURCE_ATTRIBUTES`` adds others.
        processors: get the spans.
    """

    def __init__(self, resource: Attributes, processors: Sequence[SpanProcessor]) -> None:
        # The SDK logs every retry of an exporter; a queue logs an outage, once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(dict(resource)),
            shutdown_on_exit=False,
            id_generator=_Ids(),
            span_limits=_LIMITS,
        )
        for processor in processors:
            provider.add_span_processor(processor)
        self._tracer = provider.get_tracer(_SCOPE)

    def begin(
        self,
        name: SpanName,
        parent: TraceContext | None,
        kind: SpanKind,
        attributes: Attributes,
        *,
        trace_id: int = 0,
        began: Timestamp | None = None,
    ) -> OtelSpan:
        """Begin a span.

        Args:
            parent: the span above it; ``None``: it is the first of its trace.
            trace_id: of the trace that it is the first of.
            began: its beginning; ``None``: now.
        """
        began = began or Timestamp.now()
        if parent is None:
            _first_of_trace.set(trace_id)
        span = self._tracer.start_span(
            name.value,
            context=_parent_context(parent),
            kind=trace.SpanKind[kind.name],
            attributes=attributes,
            start_time=began.wall_ns,
        )
        return OtelSpan(self, span, name.value, kind, began)


@lru_cache(maxsize=256)  # the samples of a call, and the waits of a prompt, share their parent
def _parent_context(parent: TraceContext | None) -> Any:  # noqa: ANN401 - opaque to us
    """Return the SDK's context with this span as the current one; with none for ``None``."""
    if parent is None:
        return trace.set_span_in_context(trace.INVALID_SPAN)
    return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent)))


def _span_context(context: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        context.trace_id, context.span_id, is_remote=False, trace_flags=_SAMPLED
    )


class SpanQueue(SpanProcessor):
    """The queue and the thread that bring ended spans to one destination; no caller waits for them.

    It takes the place of the SDK's batch processor, which neither counts what it drops nor ends
    within a given time.

    Args:
        destination: where spans go, for messages.
        export: sends a batch; may block.
        break_off: ends an `export` that hangs.
        interval_s: a span waits about this long for others to travel with.
    """

    def __init__(
        self,
        destination: str,
        export: Callable[[Sequence[ReadableSpan]], None],
        break_off: Callable[[], None] = lambda: None,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        def write(spans: Sequence[ReadableSpan]) -> None:
            with charge_cpu(TelemetryPart.SPANS):
                export(spans)

        self.destination = destination
        self.writer = BoundedWriter(
            "spans",
            destination,
            write,
            max_waiting=MAX_QUEUED_SPANS,
            batch=BATCH,
            interval_s=interval_s,
            break_off=break_off,
            count=_count,
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Add a span to the queue, or drop it if the queue is full."""
        self.writer.put(span)


def _count(number: int) -> None:
    SPANS.add(SpanOutcome.SENT if number > 0 else SpanOutcome.DROPPED, count=abs(number))


def collector_queue(endpoint: str, timeout_s: int = EXPORT_TIMEOUT_S) -> SpanQueue:
    """Return a queue of spans to a collector.

    Args:
        endpoint: ``http://host:port``, or with ``https`` for TLS.
        timeout_s: seconds that a batch may take.
    """
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)

    def export(spans: Sequence[ReadableSpan]) -> None:
        try:
            result = exporter.export(spans)
        except Exception as error:  # whatever a vendor raises costs spans and nothing else
            raise WriteError(f"{type(error).__name__}: {error}") from error
        if result is not SpanExportResult.SUCCESS:
            raise WriteError("the collector does not accept them")

    return SpanQueue(endpoint, export, exporter.shutdown)


def file_queue(path: Path, max_bytes: float) -> SpanQueue:
    """Return a queue of spans to a file.

    Args:
        path: the file; its folder is made with the first span.
        max_bytes: nothing is appended to a file of this size; each process may exceed it by a
            batch.
    """
    return SpanQueue(str(path), SpanFile(path, max_bytes).append)


class SpanFile:
    """Spans as lines of a file: OTLP in JSON, as OpenTelemetry's file exporter writes it.

    A line holds one batch, so that a collector's `otlpjsonfile` receiver can read the file into any
    trace store later. Several processes of a machine may append to the same file: each batch is one
    write at the file's end, which local file systems keep whole.
    """

    def __init__(self, path: Path, max_bytes: float) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._is_torn = False

    def append(self, spans: Sequence[ReadableSpan]) -> None:
        """Append one line.

        Raises:
            WriteError: the file is full or cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                if file.tell() >= self._max_bytes:
                    raise WriteError(
                        f"the file holds {self._max_bytes / 2**20:g} MiB, which is all that "
                        "sluice.telemetry.traces.file_mb allows; move it away, or raise the key"
                    )
                self._write(file, _encode_line(spans))
        except OSError as error:
            raise WriteError(str(error)) from error

    def _write(self, file: FileIO, line: bytes) -> None:
        # A full disk may take a part of a line; the next one begins on a line of its own.
        content = b"\n" + line if self._is_torn else line
        num_written = file.write(content) or 0
        if num_written:
            self._is_torn = num_written < len(content)
        if num_written < len(content):
            raise WriteError(f"only {num_written} of {len(content)} bytes were written")


def _encode_line(spans: Sequence[ReadableSpan]) -> bytes:
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    scoped = {"scope": {"name": _SCOPE}, "spans": [_span_row(span) for span in spans]}
    line = {"resourceSpans": [{"resource": resource, "scopeSpans": [scoped]}]}
    return msgspec.json.encode(line) + b"\n"


def _span_row(span: ReadableSpan) -> dict[str, object]:
    row: dict[str, object] = {
        **_ids(span.context),
        "name": span.name,
        "kind": SpanKind[span.kind.name],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
    }
    if span.parent is not None:
        row["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        row["links"] = [_ids(link.context) for link in span.links]
    if not span.status.is_ok:
        row["status"] = {"code": span.status.status_code.value, "message": span.status.description}
    return row


def _ids(context: trace.SpanContext) -> dict[str, str]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(values: Mapping[str, Any]) -> list[Mapping[str, object]]:
    return [{"key": str(key), "value": _attribute_value(value)} for key, value in values.items()]


def _attribute_value(value: str | int | float | bool) -> dict[str, object]:
    # By OTLP's names; 64-bit integers are texts in JSON, as in protobuf's mapping.
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
