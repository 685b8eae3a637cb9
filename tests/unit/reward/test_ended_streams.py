"""The log has one line for a replica that dies, or is slow, whatever number of groups it had."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from services.reward.generation import stream
from services.reward.generation.stream import EndedStreams
from sluice.rpc import client
from tests.support.reward_app import settled


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> EndedStreams:
    monkeypatch.setattr(stream, "GATHER_S", 0.05)
    return EndedStreams()


def test_streams_that_stalled_together_are_known_to_in_time_for_one_line() -> None:
    of_a_backlog_s = client._PLACES_OF_A_START * client._PLACE_S
    assert of_a_backlog_s < stream.GATHER_S  # those who ask too late for one wait for the next


def _has_warned(caplog: pytest.LogCaptureFixture, times: int) -> bool:
    return len(warnings(caplog)) == times


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


async def test_streams_that_break_together_are_one_warning_for_each_replica(
    streams: EndedStreams, caplog: pytest.LogCaptureFixture
) -> None:
    for group in range(3):
        streams.note("one", 4, f"one: reset while generating p{group}")
        await asyncio.sleep(0)
    streams.note("two", 2, "two: reset")
    await settled(lambda: len(caplog.records) == 2)
    assert warnings(caplog) == [
        "replica one: streams of 3 groups broke, 12 samples continue elsewhere; the first: one: "
        "reset while generating p0",
        "replica two: streams of 1 groups broke, 2 samples continue elsewhere; the first: two: "
        "reset",
    ]


async def test_a_replica_that_breaks_again_later_is_logged_again(
    streams: EndedStreams, caplog: pytest.LogCaptureFixture
) -> None:
    for reported in (1, 2):
        streams.note("one", 1, "one: reset")
        await settled(partial(_has_warned, caplog, reported))


async def test_a_stream_that_breaks_after_its_last_sample_is_not_counted(
    streams: EndedStreams, caplog: pytest.LogCaptureFixture
) -> None:
    streams.note("one", 0, "one: late")
    streams.note("one", 3, "one: reset")
    await settled(lambda: bool(warnings(caplog)))
    assert "streams of 1 groups broke, 3 samples" in warnings(caplog)[0]


async def test_streams_that_leave_a_slow_replica_are_one_line_and_no_warning(
    streams: EndedStreams, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for group in range(3):
            streams.note("one", 4, f"slow: p{group}", broke=False)
        await settled(lambda: bool(caplog.records))
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.INFO,
            "replica one: streams of 3 groups moved, 12 samples continue elsewhere; the first: "
            "slow: p0",
        )
    ]
