"""Measure what one span costs this process, from its beginning to its departure for a collector.

`python -m benchmarks.telemetry.span_cost` prints one JSON object: microseconds of CPU a span to
record it, to send it to a collector (`export_us`, in the queue's thread) and to write it into a
file, and those of a stage where nothing is traced.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.reporting import ROOT
from sluice.telemetry.otlp_export import OtlpSpans
from sluice.telemetry.span_export import BATCH, Exporter, SpanFile
from sluice.telemetry.tracing import TRACER, Key, Moment, RecordedSpan, SpanName

RESOURCE = {"service.name": "sluice-rollout"}
COUNT, REPEATS = 10 * BATCH, 9


class _Kept:
    """A sink that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def put(self, span: RecordedSpan) -> None:
        """Keeps one."""
        self.spans.append(span)


def _cpu_us(work: Callable[[], object]) -> float:
    """CPU microseconds for each of `COUNT`, the median of `REPEATS` times."""
    found = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        work()
        found.append((time.process_time() - began_s) / COUNT * 1e6)
    return round(median(found), 2)


def _record() -> None:
    """Spans like those of samples, which are most."""
    with TRACER.trace(SpanName.SERVE, is_always=True) as serve:
        began = Moment.now()
        for index in range(COUNT):
            if serve.context is not None:
                ended: dict[str, str | int] = {Key.SAMPLE_INDEX: index, Key.NUM_TOKENS: 100}
                ended |= {Key.FINISH_REASON: "stop", Key.VERSION: 1}
                TRACER.past(serve.context, SpanName.SAMPLE, began, ended)


def _stages() -> None:
    """What is done for stages where nothing is traced."""
    for index in range(COUNT):
        TRACER.stage(SpanName.GRADE, {Key.NUM_SAMPLES: index}).end()


def _export(exporter: Exporter, spans: list[RecordedSpan]) -> None:
    for start in range(0, COUNT, BATCH):
        exporter.export(spans[start : start + BATCH])


def record_us() -> float:
    """CPU microseconds to record a span."""
    return _recorded()[0]


def _recorded() -> tuple[float, list[RecordedSpan]]:
    kept = _Kept()
    TRACER.start([kept], 1.0)
    try:
        cost_us = _cpu_us(_record)
    finally:
        TRACER.stop()
    return cost_us, kept.spans[:COUNT]


def main() -> None:
    """Measure."""
    off_us = _cpu_us(_stages)
    recording_us, spans = _recorded()
    with (
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.telemetry.span_sink"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as sink,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert sink.stdout is not None
        exporter = OtlpSpans(f"http://127.0.0.1:{int(sink.stdout.readline())}", RESOURCE)
        export_us = _cpu_us(lambda: _export(exporter, spans))
        exporter.close()
        file = SpanFile(Path(folder) / "traces.jsonl", RESOURCE)
        file_us = _cpu_us(lambda: _export(file, spans))
        sink.kill()
    figures = {"record": recording_us, "export": export_us, "file": file_us, "off": off_us}
    sys.stdout.write(json.dumps({f"{name}_us": value for name, value in figures.items()}) + "\n")


if __name__ == "__main__":
    main()
