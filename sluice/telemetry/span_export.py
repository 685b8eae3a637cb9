"""Export ended spans from their own thread, to a file in OTLP's JSON form."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

import msgspec

from sluice.telemetry.process import SPANS, TELEMETRY_CPU, SpanOutcome, TelemetryPart
from sluice.telemetry.tracing import Attributes, RecordedSpan, TraceContext

logger = logging.getLogger(__name__)

MOST_QUEUED = 16_384
"""Spans that wait at most, about 1 kB each."""
BATCH = 512
INTERVAL_S = 1.0


class ExportError(Exception):
    """An exporter could not take a batch."""


class Exporter(Protocol):
    """Brings spans to where they are kept; its calls may block, and end by deadlines of its own."""

    @property
    def destination(self) -> str:
        """Where that is, for messages."""
        ...

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Raises ExportError if the spans did not arrive, as far as is known."""
        ...

    def close(self) -> None:
        """Ends it; a call under way in another thread is broken off if it can be."""
        ...


class SpanQueue:
    """One exporter's queue and thread.

    Args:
        exporter: gets the spans.
        most: spans that may wait.
        interval_s: a span waits about so long for others to travel with.
    """

    def __init__(
        self, exporter: Exporter, *, most: int = MOST_QUEUED, interval_s: float = INTERVAL_S
    ) -> None:
        self._exporter, self._most, self._interval_s = exporter, most, interval_s
        self._spans: deque[RecordedSpan] = deque()
        self._wake = threading.Event()
        self._is_closing = self._is_out_of_order = False
        self.num_dropped = self.num_exported = 0
        self._thread = threading.Thread(
            target=self._run, name=f"spans to {exporter.destination}", daemon=True
        )
        self._thread.start()

    def put(self, span: RecordedSpan) -> None:
        """Takes a span, at once; without room for it, it is dropped."""
        size = len(self._spans)
        if size >= self._most:
            self._drop(1)
            return
        self._spans.append(span)
        if size == BATCH:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Exports what waits, for `timeout_s` seconds at most."""
        ends_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake.set()
        # The exporter's half: a batch that hangs is broken off, and there is time to see it end.
        self._thread.join(timeout_s / 2)
        if self._thread.is_alive():
            self._exporter.close()
            self._thread.join(max(0.0, ends_s - time.monotonic()))
        else:
            self._exporter.close()
        lost = self.num_dropped + len(self._spans)
        if lost:
            logger.warning(
                "%d spans never reached %s, %d did",
                *(lost, self._exporter.destination, self.num_exported),
            )

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._spans:
            with TELEMETRY_CPU.charged(TelemetryPart.SPANS):
                batch = [self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))]
                self._export(batch)
            if self._is_closing and self._is_out_of_order:
                return

    def _export(self, batch: Sequence[RecordedSpan]) -> None:
        try:
            self._exporter.export(batch)
        except Exception as error:  # noqa: BLE001  the queue outlives whatever an exporter raises
            self._failed(batch, error)
            return
        self.num_exported += len(batch)
        SPANS.add(SpanOutcome.SENT, count=len(batch))
        if self._is_out_of_order:
            self._is_out_of_order = False
            logger.info(
                "spans reach %s again; %d were dropped",
                *(self._exporter.destination, self.num_dropped),
            )

    def _failed(self, batch: Sequence[RecordedSpan], error: Exception) -> None:
        self._drop(len(batch))
        if not self._is_out_of_order:
            is_known = isinstance(error, ExportError)
            logger.warning(
                "spans do not reach %s and are dropped until they do: %s",
                *(self._exporter.destination, error if is_known else repr(error)),
                exc_info=None if is_known else error,
            )
        self._is_out_of_order = True

    def _drop(self, count: int) -> None:
        self.num_dropped += count
        SPANS.add(SpanOutcome.DROPPED, count=count)


# Spans as lines of a file, in the form of OpenTelemetry's file exporter: OTLP in JSON.
#
# A line holds the spans of one batch, so that a collector's `otlpjsonfile` receiver can read the
# file into any trace store later. Several processes of a machine may append to the same file:
# each batch is one write at the file's end, which local file systems keep whole.

SCOPE = "sluice"
_STATUS_ERROR = 2


class SpanFile:
    """Appends spans to `path`; the folder is made with the first of them.

    Args:
        path: the file.
        resource: attributes of this process.
        most_bytes: nothing is appended to a file of this size; each writer may exceed it by a
            batch.
    """

    def __init__(self, path: Path, resource: Attributes, most_bytes: float = math.inf) -> None:
        self._path, self._resource = path, {"attributes": _attributes(resource)}
        self._most_bytes, self._is_torn = most_bytes, False

    @property
    def destination(self) -> str:
        """The file's name."""
        return str(self._path)

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        """Appends one line. Raises ExportError if the file is full or cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                if file.tell() >= self._most_bytes:
                    raise ExportError(
                        f"the file holds {self._most_bytes / 2**20:g} MiB, which is all that "
                        "sluice.telemetry.traces.file_mb allows; move it away, or raise the key"
                    )
                self._append(file, self._line(spans))
        except OSError as error:
            raise ExportError(str(error)) from error

    def _line(self, spans: Sequence[RecordedSpan]) -> bytes:
        scoped = {"scope": {"name": SCOPE}, "spans": [_span(span) for span in spans]}
        line = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scoped]}]}
        return msgspec.json.encode(line) + b"\n"

    def _append(self, file: FileIO, line: bytes) -> None:
        """A full disk may take a part of a line; the next one begins on a line of its own."""
        whole = b"\n" + line if self._is_torn else line
        num_written = file.write(whole) or 0
        if num_written:
            self._is_torn = num_written < len(whole)
        if num_written < len(whole):
            raise ExportError(f"only {num_written} of {len(whole)} bytes were written")

    def close(self) -> None:
        """Every line was written by itself: nothing is open."""


def _span(span: RecordedSpan) -> dict[str, object]:
    end_ns = span.start_ns + (span.duration_ns or 0)
    row: dict[str, object] = {
        **_ids(span.context),
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        row["parentSpanId"] = f"{span.parent_id:016x}"
    if span.links:
        row["links"] = [_ids(context) for context in span.links]
    if span.error is not None:
        row["status"] = {"code": _STATUS_ERROR, "message": span.error}
    return row


def _ids(context: TraceContext) -> dict[str, str]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(values: Attributes) -> list[Mapping[str, object]]:
    return [{"key": str(key), "value": _value(value)} for key, value in values.items()]


def _value(value: str | int | float | bool) -> dict[str, object]:
    """By OTLP's names; 64-bit integers are texts in JSON, as protobuf has it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
