"""Spans: what is recorded under which parent, and that nothing is where tracing is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from sluice.telemetry.tracing import (
    NOTHING,
    TRACER,
    RecordedSpan,
    SpanAttribute,
    SpanName,
    TraceContext,
)
from tests.support.seen_spans import traced

CALLER = TraceContext(0xABC, 0xDEF, is_sampled=True)
UNSAMPLED = TraceContext(0xABC, 0xDEF, is_sampled=False)


def test_without_tracing_every_span_is_the_same_nothing() -> None:
    assert TRACER.trace(SpanName.PROMPT) is NOTHING
    assert TRACER.trace(SpanName.STEP, is_always=True) is NOTHING
    assert TRACER.span(SpanName.GRADE) is NOTHING
    assert TRACER.child(CALLER, SpanName.GRADE) is NOTHING
    assert TRACER.within(CALLER) is NOTHING
    assert TRACER.unrecorded() is NOTHING
    assert TRACER.current() is None
    with NOTHING as span:
        span.set({SpanAttribute.STEP: 1})
        span.link([CALLER])
        span.fail("no")
    assert NOTHING.context is None


def test_a_forked_process_makes_other_ids() -> None:
    code = """
        import os
        from sluice.telemetry.tracing import TRACE_BITS, new_id
        new_id(TRACE_BITS)
        os.fork()
        os.write(1, b"%d\\n" % new_id(TRACE_BITS))
    """
    # Not in the tests' process, whose threads may hold locks that the child would wait for.
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ids = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.split()
    assert len(set(ids)) == 2


def test_a_span_inside_another_is_its_child() -> None:
    with traced() as kept, TRACER.trace(SpanName.PROMPT), TRACER.span(SpanName.GRADE):
        pass
    grade, prompt = kept.spans
    assert (grade.name, prompt.name) == ("grade", "prompt")
    assert grade.parent_id == prompt.context.span_id
    assert grade.context.trace_id == prompt.context.trace_id
    assert prompt.parent_id is None


def test_a_task_belongs_to_the_span_that_it_was_started_in() -> None:
    async def work(name: SpanName) -> None:
        await asyncio.sleep(0)
        with TRACER.span(name):
            await asyncio.sleep(0)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            with TRACER.trace(SpanName.PROMPT):
                tasks.create_task(work(SpanName.GENERATE))
            tasks.create_task(work(SpanName.GRADE))  # outside: of no trace

    with traced() as kept:
        asyncio.run(run())
    prompt, generate = kept.spans
    assert generate.parent_id == prompt.context.span_id


def test_a_caller_decides_about_its_own_trace() -> None:
    with traced(ratio=0.0) as kept:
        with TRACER.trace(SpanName.SERVE, caller=CALLER):
            pass
        with TRACER.trace(SpanName.SERVE):
            assert TRACER.span(SpanName.SAMPLE) is NOTHING
    (span,) = kept.spans
    assert (span.context.trace_id, span.parent_id) == (CALLER.trace_id, CALLER.span_id)


def test_what_a_caller_does_not_record_is_passed_on_as_not_recorded() -> None:
    with traced() as kept, TRACER.trace(SpanName.SERVE, caller=UNSAMPLED):
        assert TRACER.current() == UNSAMPLED
        assert TRACER.span(SpanName.SAMPLE) is NOTHING
    assert kept.begun == 0


def test_a_trace_that_was_not_chosen_is_passed_on_as_not_recorded() -> None:
    with traced(ratio=0.0) as kept, TRACER.trace(SpanName.PROMPT, trace_id=7):
        current = TRACER.current()
        assert current is not None
        assert (current.trace_id, current.is_sampled) == (7, False)
    assert kept.begun == 0


def test_a_step_is_recorded_whatever_share_of_the_prompts_is() -> None:
    with traced(ratio=0.0) as kept, TRACER.trace(SpanName.STEP, is_always=True):
        pass
    assert len(kept.spans) == 1


def test_nothing_inside_unrecorded_is_recorded() -> None:
    with traced() as kept, TRACER.trace(SpanName.STEP), TRACER.unrecorded():
        assert TRACER.span(SpanName.GENERATE) is NOTHING
    assert [span.name for span in kept.spans] == ["step"]


def test_an_exception_is_the_error_of_the_spans_that_it_leaves() -> None:
    def fail() -> None:
        with TRACER.trace(SpanName.PROMPT):
            with TRACER.span(SpanName.GRADE):
                pass
            with TRACER.span(SpanName.FILTER):
                raise ValueError("no" * 1000)

    with traced() as kept, pytest.raises(ValueError, match="no"):
        fail()
    grade, judged, prompt = kept.spans
    assert grade.error is None
    assert judged.error == prompt.error
    assert judged.error is not None
    assert judged.error.startswith("ValueError: nono")
    assert len(judged.error) == 500


async def test_a_cancelled_task_leaves_no_span_open() -> None:
    entered = asyncio.Event()

    async def work() -> None:
        with TRACER.trace(SpanName.PROMPT), TRACER.span(SpanName.GENERATE):
            entered.set()
            await asyncio.Event().wait()

    with traced() as kept:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work())
            await entered.wait()
            task.cancel()
    assert kept.begun == 2
    assert [span.error for span in kept.spans] == ["cancelled", "cancelled"]


def test_ending_twice_records_once() -> None:
    with traced() as kept:
        span = TRACER.trace(SpanName.PROMPT)
        span.end()
        span.end()
    assert len(kept.spans) == 1


def test_the_same_time_in_another_trace_links_to_where_it_was_spent() -> None:
    with traced() as kept:
        with TRACER.trace(SpanName.TRAIN_STEP) as span:
            pass
        assert isinstance(span, RecordedSpan)
        span.again_under(CALLER, {SpanAttribute.STEP: 3})
    own, other = kept.spans
    assert (other.start_ns, other.duration_ns) == (own.start_ns, own.duration_ns)
    assert (other.context.trace_id, other.parent_id) == (CALLER.trace_id, CALLER.span_id)
    assert other.links == (own.context,)
    assert other.attributes == {"sluice.step": 3}
