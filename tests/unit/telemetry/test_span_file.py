"""Spans in a file: OTLP in JSON, whole lines whatever process writes."""

from __future__ import annotations

import json
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from sluice.concurrency.threads import WriteError
from sluice.telemetry.otel import OtelRecorder, SpanFile
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanKind, SpanName, TraceContext
from tests.support.seen_spans import Kept, spans_in, traced

RESOURCE = {"service.name": "sluice-reward"}
MANY_BYTES = 1 << 30
CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)


def spans(count: int) -> list[ReadableSpan]:
    with traced() as kept:
        for _ in range(count):
            TRACER.trace(SpanName.SAMPLE).end()
    return kept.ended


def test_a_span_is_read_back_as_it_was_recorded(tmp_path: Path) -> None:
    attributes = {
        SpanAttribute.STEP: 2**40,
        SpanAttribute.DETAIL: "ü",
        "share": 0.5,
        "is_last": True,
    }
    kept = Kept()
    TRACER.start(OtelRecorder(RESOURCE, [kept]), 1.0)
    try:
        span = TRACER.child(CALLER, SpanName.ATTEMPT, attributes, SpanKind.CLIENT)
        span.link([TraceContext(1, 2, is_sampled=True)])
        span.fail("lost")
        span.end()
    finally:
        TRACER.stop()
    path = tmp_path / "later" / "traces.jsonl"
    SpanFile(path, MANY_BYTES).append(kept.ended)
    (seen,) = spans_in(path)
    (recorded,) = kept.spans
    assert seen.name == "attempt"
    assert seen.trace == f"{0xABC:032x}"
    assert seen.parent == f"{0xDEF:016x}"
    assert seen.id == f"{recorded.context.span_id:016x}"
    assert seen.start_ns == recorded.start_ns
    assert seen.end_ns - seen.start_ns == recorded.duration_ns
    assert seen.attributes == {
        "sluice.step": 2**40,
        "sluice.detail": "ü",
        "share": 0.5,
        "is_last": True,
    }
    assert seen.links == ((f"{1:032x}", f"{2:016x}"),)
    assert (seen.error, seen.service) == ("lost", "sluice-reward")
    assert (
        json.loads(path.read_text())["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["kind"] == 3
    )


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    path, some = tmp_path / "traces.jsonl", spans(200)

    def write() -> None:
        file = SpanFile(path, MANY_BYTES)
        for _ in range(20):
            file.append(some)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(spans_in(path)) == 4 * 20 * 200


def test_a_file_that_cannot_be_written_is_the_exporters_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WriteError, match="taken"):
        SpanFile(tmp_path / "taken" / "traces.jsonl", MANY_BYTES).append(spans(1))


def test_a_file_at_its_bound_takes_nothing_until_it_is_moved_away(tmp_path: Path) -> None:
    path, some = tmp_path / "traces.jsonl", spans(3)
    file = SpanFile(path, max_bytes=10)
    file.append(some)
    size = path.stat().st_size
    with pytest.raises(WriteError, match=r"sluice\.telemetry\.traces\.file_mb"):
        file.append(some)
    assert path.stat().st_size == size
    path.rename(tmp_path / "moved")
    file.append(some)
    assert len(spans_in(path)) == 3


def test_after_a_line_that_was_cut_short_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = [20, 0, None]

    class Full(FileIO):
        def write(self, data: Any, /) -> int:
            most = capacity.pop(0)
            return super().write(data if most is None else data[:most])

    monkeypatch.setattr(Path, "open", lambda path, *_, **__: Full(path, "ab"))
    path = tmp_path / "traces.jsonl"
    file = SpanFile(path, MANY_BYTES)
    for _ in range(2):
        with pytest.raises(WriteError, match="bytes were written"):
            file.append(spans(2))
    file.append(spans(3))
    monkeypatch.undo()
    torn, whole, end = path.read_bytes().split(b"\n")
    assert (len(torn), end) == (20, b"")
    assert len(json.loads(whole)["resourceSpans"][0]["scopeSpans"][0]["spans"]) == 3
