"""Trace context as others write it, and the share of traces that is recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry.tracing import (
    SPAN_BITS,
    TRACE_BITS,
    TraceContext,
    is_chosen,
    new_id,
    parse_traceparent,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = TraceContext(int(TRACE, 16), int(SPAN, 16), is_sampled=True)
contexts = st.builds(
    TraceContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    is_sampled=st.booleans(),
)


@given(contexts)
def test_a_context_is_read_back_as_it_was_written(context: TraceContext) -> None:
    assert parse_traceparent(context.traceparent) == context


@pytest.mark.parametrize(
    ("value", "context"),
    [
        (f"00-{TRACE}-{SPAN}-01", GIVEN),
        (f"00-{TRACE}-{SPAN}-03", GIVEN),  # further flags
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", GIVEN),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE}-{SPAN}-01\n", None),
        (f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}", None),
        ("", None),
        (b"00", None),
        (None, None),
    ],
)
def test_only_what_the_standard_allows_is_a_context(
    value: object, context: TraceContext | None
) -> None:
    assert parse_traceparent(value) == context


def test_new_ids_differ_and_are_never_0() -> None:
    ids = {new_id(TRACE_BITS) for _ in range(1000)} | {new_id(SPAN_BITS) for _ in range(1000)}
    assert len(ids) == 2000
    assert 0 not in ids


@given(st.integers(1, 2**128 - 1))
def test_the_share_1_takes_every_trace_and_0_none(trace_id: int) -> None:
    assert is_chosen(trace_id, 1.0)
    assert not is_chosen(trace_id, 0.0)


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_takes_what_a_smaller_one_takes(
    trace_id: int, one: float, other: float
) -> None:
    assert is_chosen(trace_id, min(one, other)) <= is_chosen(trace_id, max(one, other))


def test_about_the_share_that_was_asked_for_is_taken() -> None:
    taken = sum(is_chosen(new_id(TRACE_BITS), 0.25) for _ in range(10_000))
    assert 2_000 < taken < 3_000
