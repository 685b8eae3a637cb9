"""Spans at a collector, by OpenTelemetry's exporter."""

from __future__ import annotations

import logging

import pytest

from sluice.telemetry.otel import OtelRecorder, collector_queue
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanKind, SpanName, TraceContext
from tests.support.seen_spans import Kept, collector

CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)
NOBODY = "http://127.0.0.1:1"
WAIT_S = 60.0


def test_a_collector_gets_spans_as_they_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=west")
    kept = Kept()
    with collector() as found:
        queue = collector_queue(found.address)
        TRACER.start(OtelRecorder({"service.name": "sluice-trainer"}, [kept, queue]), 1.0)
        span = TRACER.child(CALLER, SpanName.ATTEMPT, {SpanAttribute.STEP: 3}, SpanKind.CLIENT)
        span.link([TraceContext(1, 2, is_sampled=True)])
        span.fail("lost")
        span.end()
        TRACER.trace(SpanName.PROMPT, attributes={SpanAttribute.PROMPT_ID: "p"}).end()
        TRACER.stop()
        queue.writer.close(WAIT_S)
    own = kept.spans
    attempt, prompt = found.spans()
    assert (attempt.name, attempt.kind) == ("attempt", 3)
    assert attempt.trace_id == (0xABC).to_bytes(16, "big")
    assert attempt.parent_span_id == (0xDEF).to_bytes(8, "big")
    assert attempt.span_id == own[0].context.span_id.to_bytes(8, "big")
    assert attempt.start_time_unix_nano == own[0].start_ns
    assert attempt.end_time_unix_nano == own[0].start_ns + own[0].duration_ns
    assert {a.key: a.value.int_value for a in attempt.attributes} == {"sluice.step": 3}
    assert [link.trace_id for link in attempt.links] == [(1).to_bytes(16, "big")]
    assert (attempt.status.code, attempt.status.message) == (2, "lost")
    assert prompt.parent_span_id == b""
    assert prompt.status.code == 0
    (resource,) = found.requests[0].resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "sluice-trainer"
    assert names["cluster"] == "west"


def test_a_dead_collector_costs_its_spans_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = collector_queue(NOBODY, timeout_s=1)
    TRACER.start(OtelRecorder({}, [queue]), 1.0)
    with caplog.at_level(logging.DEBUG, "opentelemetry"):
        TRACER.trace(SpanName.PROMPT).end()
        TRACER.stop()
        queue.writer.close(WAIT_S)
    assert queue.writer.num_dropped == 1
    assert caplog.text.count("the collector does not accept them") == 1
