"""Telemetry says what it takes of this process's CPU."""

from __future__ import annotations

import threading
import time

from sluice.concurrency.threads import WriteError
from sluice.telemetry.metrics import SPANS, TELEMETRY_CPU, SpanOutcome, TelemetryPart, charge_cpu
from sluice.telemetry.otel import OtelRecorder, SpanQueue
from sluice.telemetry.tracing import SpanName, Tracer

SPUN_S = 0.05


def spin(seconds: float) -> None:
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


def send_one_span(*, takes: bool) -> None:
    """By an exporter that computes, and takes the span or not."""

    def export(_: object) -> None:
        spin(SPUN_S)
        if not takes:
            raise WriteError("no")

    queue = SpanQueue("nowhere", export, interval_s=3600)
    tracer = Tracer()
    tracer.start(OtelRecorder({}, [queue]), 1.0)
    tracer.trace(SpanName.SAMPLE).end()
    queue.writer.close(30.0)


def spans_so_far(outcome: SpanOutcome) -> float:
    return SPANS.counts().get((outcome,), 0)


def cpu_so_far(part: TelemetryPart) -> float:
    return TELEMETRY_CPU.counts().get((part,), 0.0)


def test_what_an_exporter_computes_counts_for_spans_and_waiting_does_not() -> None:
    spans_s, scrapes_s = map(cpu_so_far, TelemetryPart)
    send_one_span(takes=True)
    with charge_cpu(TelemetryPart.SCRAPES):
        time.sleep(SPUN_S)
    assert cpu_so_far(TelemetryPart.SPANS) - spans_s >= SPUN_S
    assert cpu_so_far(TelemetryPart.SCRAPES) - scrapes_s < SPUN_S


def test_another_thread_computes_for_itself() -> None:
    before = cpu_so_far(TelemetryPart.SCRAPES)
    with charge_cpu(TelemetryPart.SCRAPES):
        other = threading.Thread(target=spin, args=(10 * SPUN_S,))
        other.start()
        other.join()
    assert cpu_so_far(TelemetryPart.SCRAPES) - before < 10 * SPUN_S


def test_spans_are_counted_by_what_became_of_them() -> None:
    sent, dropped = spans_so_far(SpanOutcome.SENT), spans_so_far(SpanOutcome.DROPPED)
    send_one_span(takes=True)
    send_one_span(takes=False)
    assert spans_so_far(SpanOutcome.SENT) - sent == 1
    assert spans_so_far(SpanOutcome.DROPPED) - dropped == 1
