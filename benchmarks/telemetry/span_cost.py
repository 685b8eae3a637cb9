"""Measure what one span costs this process, from its beginning to its departure for a collector.

`python -m benchmarks.telemetry.span_cost` prints one JSON object: microseconds of CPU a span to
record it, to send it to a collector (`export_us`, in the queue's thread) and to write it into a
file, and those of a stage of a prompt that is not sampled and of one where tracing is off.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from sluice.telemetry.otel import BATCH, SpanFile
from sluice.telemetry.tracing import TRACER, Key, Moment, SpanName
from tests.support.seen_spans import collector, traced

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

COUNT, REPEATS = 10 * BATCH, 9


def _cpu_us(work: Callable[[], object]) -> float:
    """Return this thread's CPU microseconds for each of `COUNT`, the median of `REPEATS` times."""
    found = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        work()
        found.append((time.thread_time() - began_s) / COUNT * 1e6)
    return round(median(found), 2)


def _record() -> None:
    """Record spans like those of samples, which are most."""
    with TRACER.trace(SpanName.SERVE, is_always=True) as serve:
        began = Moment.now()
        for index in range(COUNT):
            if serve.context is not None:
                ended: dict[str, str | int] = {Key.SAMPLE_INDEX: index, Key.NUM_TOKENS: 100}
                ended |= {Key.FINISH_REASON: "stop", Key.VERSION: 1}
                TRACER.past(serve.context, SpanName.SAMPLE, began, ended)


def _stages() -> None:
    """Begin and end stages that are not recorded."""
    for index in range(COUNT):
        TRACER.span(SpanName.GRADE, {Key.NUM_SAMPLES: index}).end()


def _export(export: Callable[[Sequence[ReadableSpan]], object], spans: list[ReadableSpan]) -> None:
    for start in range(0, COUNT, BATCH):
        export(spans[start : start + BATCH])


def record_us() -> float:
    """Return the CPU microseconds to record a span."""
    return _recorded()[0]


def _recorded() -> tuple[float, list[ReadableSpan]]:
    with traced() as kept:
        cost_us = _cpu_us(_record)
    return cost_us, kept.ended[:COUNT]


def _unsampled_us() -> float:
    with traced(0.0), TRACER.trace(SpanName.PROMPT):
        return _cpu_us(_stages)


def main() -> None:
    """Measure, and print the figures."""
    figures = {"off": _cpu_us(_stages), "unsampled": _unsampled_us()}
    figures["record"], spans = _recorded()
    with collector() as sink, tempfile.TemporaryDirectory() as folder:
        exporter = OTLPSpanExporter(endpoint=sink.address)
        figures["export"] = _cpu_us(lambda: _export(exporter.export, spans))
        exporter.shutdown()
        file = SpanFile(Path(folder) / "traces.jsonl", math.inf)
        figures["file"] = _cpu_us(lambda: _export(file.append, spans))
    sys.stdout.write(json.dumps({f"{name}_us": value for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    main()
