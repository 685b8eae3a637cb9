"""The page on which a scorer notes its progress is the scorer's to write, so it is not believed."""

from __future__ import annotations

import asyncio
from mmap import mmap
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.grading import scorer_worker
from services.reward.grading.messages import (
    PROGRESS_BYTES,
    Progress,
    ScoreReply,
    ScorerNumber,
    frame,
    note_idle,
    note_progress,
    read_progress,
)
from services.reward.grading.scorer_worker import ScorerWorker
from sluice.data.scoring import ScorerInput

SENT_AT, NOW, NUM_ITEMS = 100.0, 160.0, 3


def page_with(item: int, started_at: float) -> mmap:
    page = mmap(-1, PROGRESS_BYTES)
    note_progress(page, item, started_at)
    return page


@pytest.mark.parametrize("item", [-(2**63), -2, -1, 3, 2**40])
def test_an_item_outside_of_the_request_counts_as_none(item: int) -> None:
    assert read_progress(page_with(item, 120.0), NUM_ITEMS, SENT_AT, NOW) is None


@pytest.mark.parametrize(
    ("noted", "read"),
    [(120.0, 120.0), (1e300, NOW), (float("inf"), NOW), (0.0, SENT_AT), (float("nan"), SENT_AT)],
)
def test_a_time_outside_of_the_request_counts_as_the_nearest_one(noted: float, read: float) -> None:
    assert read_progress(page_with(1, noted), NUM_ITEMS, SENT_AT, NOW) == Progress(1, read)


@given(st.binary(min_size=16, max_size=16))
def test_whatever_is_written_progress_is_within_the_request(content: bytes) -> None:
    page = mmap(-1, PROGRESS_BYTES)
    page[:16] = content
    progress = read_progress(page, NUM_ITEMS, SENT_AT, NOW)
    assert progress is None or (
        0 <= progress.item < NUM_ITEMS and SENT_AT <= progress.started_at <= NOW
    )


def test_between_requests_there_is_no_progress() -> None:
    page = page_with(1, 120.0)
    note_idle(page)
    assert read_progress(page, NUM_ITEMS, SENT_AT, NOW) is None


class AnsweringLate:
    """A scorer process whose answer is on its way when the time of its last item is over."""

    def __init__(self, page: mmap) -> None:
        self.stdin, self.stdout, self._page = self, asyncio.StreamReader(), page

    def write(self, _request: bytes) -> None:
        note_progress(self._page, 0, 0.0)
        reply = frame(ScoreReply(1, (ScorerNumber(1.0, {}),)))
        asyncio.get_running_loop().call_later(0.05, self.stdout.feed_data, reply)


async def test_an_answer_that_is_on_its_way_when_the_time_is_over_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scorer_worker, "LAST_READ_S", 30.0)
    page = mmap(-1, PROGRESS_BYTES)
    worker = ScorerWorker(cast("Any", AnsweringLate(page)), page, 0.001, "mark")
    answers = await worker.score([ScorerInput("gsm8k", "#### 1", "1")])
    assert answers == (ScorerNumber(1.0, {}),)
