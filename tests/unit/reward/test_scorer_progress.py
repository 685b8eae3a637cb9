"""The page on which a scorer notes its progress is the scorer's to write, so it is not believed."""

from __future__ import annotations

from mmap import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.grading.messages import (
    PROGRESS_BYTES,
    Progress,
    note_idle,
    note_progress,
    read_progress,
)

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
