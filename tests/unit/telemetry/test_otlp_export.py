"""Spans at a collector, by OpenTelemetry's exporter."""

from __future__ import annotations

import logging

import pytest

from sluice.telemetry.tracing import TRACER, Key, RecordedSpan, SpanKind, SpanName, TraceContext
from tests.support.seen_spans import collector, traced

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")

CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)
NOBODY = "http://127.0.0.1:1"


def recorded() -> list[RecordedSpan]:
    with traced() as kept:
        span = TRACER.child(CALLER, SpanName.ATTEMPT, {Key.STEP: 3}, SpanKind.CLIENT)
        span.link([TraceContext(1, 2, is_sampled=True)])
        span.fail("lost")
        span.end()
        TRACER.trace(SpanName.PROMPT, attributes={Key.PROMPT_ID: "p"}).end()
    return kept.spans


def test_a_collector_gets_spans_as_they_were_recorded() -> None:
    from sluice.telemetry.otlp_export import OtlpSpans

    own = recorded()
    with collector() as found:
        exporter = OtlpSpans(found.address, {"service.name": "sluice-trainer"})
        exporter.export(own)
        exporter.close()
    attempt, prompt = found.spans()
    assert (attempt.name, attempt.kind) == ("attempt", 3)
    assert attempt.trace_id == (0xABC).to_bytes(16, "big")
    assert attempt.parent_span_id == (0xDEF).to_bytes(8, "big")
    assert attempt.span_id == own[0].context.span_id.to_bytes(8, "big")
    assert attempt.start_time_unix_nano == own[0].start_ns
    assert attempt.end_time_unix_nano == own[0].start_ns + (own[0].duration_ns or 0)
    assert {a.key: a.value.int_value for a in attempt.attributes} == {"sluice.step": 3}
    assert [link.trace_id for link in attempt.links] == [(1).to_bytes(16, "big")]
    assert (attempt.status.code, attempt.status.message) == (2, "lost")
    assert prompt.parent_span_id == b""
    assert prompt.status.code == 0
    (resource,) = found.requests[0].resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "sluice-trainer"


def test_a_dead_collector_is_an_error_within_the_time_that_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sluice.telemetry.otlp_export import OtlpSpans
    from sluice.telemetry.span_export import ExportError

    exporter = OtlpSpans(NOBODY, {}, timeout_s=1)
    with caplog.at_level(logging.DEBUG, "opentelemetry"), pytest.raises(ExportError):
        exporter.export(recorded())
    exporter.close()


def test_attributes_that_compare_equal_keep_their_types_and_many_of_them_cost_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sluice.telemetry import otlp_export

    monkeypatch.setattr(otlp_export, "_MOST_ATTRIBUTES", 4)
    values: list[str | int | float | bool] = [1, True, 1.0, "1", 2, 3, 4, 1, True, 1.0]
    with traced() as kept:
        for value in values:
            TRACER.trace(SpanName.PROMPT, attributes={Key.STEP: value}).end()
    with collector() as found:
        exporter = otlp_export.OtlpSpans(found.address, {})
        exporter.export(kept.spans)
        exporter.close()
    kinds = {"intValue": int, "boolValue": bool, "doubleValue": float, "stringValue": str}
    sent = [span.attributes[0].value.WhichOneof("value") for span in found.spans()]
    expected = [name for value in values for name, kind in kinds.items() if type(value) is kind]
    assert [name.replace("_v", "V") for name in sent] == expected
    assert len(otlp_export._ATTRIBUTES) <= 4
