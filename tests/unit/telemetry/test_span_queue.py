"""Spans leave the process without anybody waiting for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from sluice.telemetry import span_export
from sluice.telemetry.span_export import ExportError, SpanQueue
from sluice.telemetry.tracing import RecordedSpan, SpanName, Tracer

WAIT_S = 20.0


@dataclass
class Destination:
    """Takes batches; `before` runs first, in the queue's thread."""

    before: Callable[[], None] = lambda: None
    batches: list[int] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_closed: threading.Event = field(default_factory=threading.Event)
    destination: str = "somewhere"

    def export(self, spans: Sequence[RecordedSpan]) -> None:
        self.arrived.release()
        self.before()
        self.batches.append(len(spans))

    def close(self) -> None:
        self.is_closed.set()


def fill(queue: SpanQueue, count: int) -> None:
    tracer = Tracer()
    tracer.start([queue], 1.0)
    for _ in range(count):
        tracer.trace(SpanName.SAMPLE).end()


def test_spans_arrive_in_batches_and_the_last_ones_at_the_end() -> None:
    destination = Destination()
    queue = SpanQueue(destination, interval_s=3600)
    fill(queue, 1100)
    queue.close(WAIT_S)
    assert sum(destination.batches) == queue.num_exported == 1100
    assert max(destination.batches) <= span_export.BATCH
    assert queue.num_dropped == 0
    assert destination.is_closed.is_set()


def test_spans_leave_before_a_full_batch_is_there() -> None:
    destination = Destination()
    queue = SpanQueue(destination, interval_s=0.001)
    fill(queue, 1)
    assert destination.arrived.acquire(timeout=WAIT_S)
    queue.close(WAIT_S)


def test_a_queue_that_is_full_drops_and_counts_and_nobody_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = threading.Event()
    destination = Destination(before=lambda: (go_on.wait(WAIT_S), None)[1])
    queue = SpanQueue(destination, most=10, interval_s=0.001)
    fill(queue, 1)
    assert destination.arrived.acquire(timeout=WAIT_S)  # it hangs in the first export
    fill(queue, 25)
    assert queue.num_dropped == 15
    go_on.set()
    queue.close(WAIT_S)
    assert queue.num_exported == 11
    assert "15 spans never reached somewhere, 11 did" in caplog.text


def test_an_outage_is_told_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    is_dead = threading.Event()
    is_dead.set()

    def fail() -> None:
        if is_dead.is_set():
            raise ExportError("nobody listens")

    destination = Destination(before=fail)
    queue = SpanQueue(destination, interval_s=0.001)
    for _ in range(3):
        fill(queue, 1)
        assert destination.arrived.acquire(timeout=WAIT_S)
    is_dead.clear()
    fill(queue, 2)
    queue.close(WAIT_S)
    assert caplog.text.count("nobody listens") == 1
    assert caplog.text.count("again") == 1
    assert queue.num_dropped + queue.num_exported == 5
    assert queue.num_exported > 0


def test_an_exporter_that_hangs_is_closed_and_left(caplog: pytest.LogCaptureFixture) -> None:
    destination = Destination()
    destination.before = lambda: (destination.is_closed.wait(WAIT_S), None)[1]
    queue = SpanQueue(destination, interval_s=0.001)
    fill(queue, 3)
    assert destination.arrived.acquire(timeout=WAIT_S)
    queue.close(0.2)
    assert destination.is_closed.is_set()


def test_after_a_failure_at_the_end_the_rest_is_given_up() -> None:
    def fail() -> None:
        raise ExportError("nobody listens")

    destination = Destination(before=fail)
    queue = SpanQueue(destination, interval_s=3600, most=10_000)
    fill(queue, 500)
    queue.close(WAIT_S)
    assert destination.batches == []
    assert queue.num_exported == 0


@pytest.mark.parametrize("error", [ValueError("odd"), UnicodeEncodeError("utf-8", "x", 0, 1, "no")])
def test_whatever_an_exporter_raises_costs_its_batch_and_no_more(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [error]

    def fail() -> None:
        if failures:
            raise failures.pop()

    destination = Destination(before=fail)
    queue = SpanQueue(destination, interval_s=0.001)
    fill(queue, 1)
    assert destination.arrived.acquire(timeout=WAIT_S)
    fill(queue, 1)
    assert destination.arrived.acquire(timeout=WAIT_S)
    queue.close(WAIT_S)
    assert (queue.num_dropped, queue.num_exported) == (1, 1)
    assert caplog.text.count("spans do not reach somewhere") == 1
