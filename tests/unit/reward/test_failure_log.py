"""Failures of one reason are one line with a count; the first has all that helps to mend it."""

from __future__ import annotations

import json
import logging

import pytest

from services.reward.grading.frames import frame_texts, place_of
from services.reward.records.failure_log import COUNT_EVERY_S, FailureLog, reason_of
from sluice.types import Failed, FailureKind

FRAMES = ("/data/mine.py:2 in compute_score: return extra[key]",)


def failure(key: str) -> Failed:
    detail = f"KeyError: '{key}' in compute_score (mine.py:2)"
    return Failed(FailureKind.UNSCORABLE, detail, FRAMES)


def test_the_first_failure_of_a_reason_shows_the_authors_frames_and_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = FailureLog(lambda: now)
    for number in range(500):
        log.failed(failure(f"row{number}"), f"prompt {number}")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("prompt 0: unscorable: KeyError: 'row0'")
    assert caplog.messages[0].endswith(f"; at {FRAMES[0]}")
    now = COUNT_EVERY_S
    log.failed(failure("last"), "prompt 500")
    log.failed(failure("last"), "prompt 501")
    (_, counted) = caplog.messages
    assert counted == (
        "unscorable: KeyError: 'last' in compute_score (mine.py:2): 501 samples so far"
    )


def test_each_reason_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    log.failed(failure("a"), "prompt 1")
    log.failed(Failed(FailureKind.SCORER_TIMEOUT, "no answer within 10 s"), "prompt 2")
    log.note("a.parquet, row 3: prompt: 45016 tokens", "prompts left out", "prompt 3")
    assert len(caplog.messages) == 3


def test_a_reason_is_what_stays_when_values_differ_and_the_line_of_the_file_counts() -> None:
    assert reason_of("row 3: 'a' is 17") == reason_of("row 9: 'b' is 2.5")
    assert reason_of("KeyError: 'a' in f (x.py:2)") != reason_of("KeyError: 'a' in f (x.py:9)")


def test_an_exception_is_placed_in_the_authors_code_and_not_in_a_library() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("no json")
    assert "test_failure_log.py:" in place_of(caught.value)
    (frame,) = frame_texts(caught.value)
    assert frame.endswith('json.loads("no json")')
