"""Spans as lines of a file, in the form of OpenTelemetry's file exporter: OTLP in JSON.

A line holds the spans of one batch, so that a collector's `otlpjsonfile` receiver can read the
file into any trace store later. Several processes of a machine may append to the same file: each
batch is one write at the file's end, which local file systems keep whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import msgspec

from sluice.telemetry.span_queue import ExportError
from sluice.telemetry.trace_context import TraceContext
from sluice.telemetry.tracing import Attributes, RecordedSpan

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
