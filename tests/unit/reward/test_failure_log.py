"""Failures of one reason are one line with a count; the first has all that helps to mend it."""

from __future__ import annotations

import json
import logging

import pytest

from services.reward.grading.scorer_main import frame_texts, place_of
from services.reward.records.failures import COUNT_EVERY_S, MAX_REASONS, FailureLog, reason_of
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
        log.note_failure(failure(f"row{number}"), f"prompt {number}")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("prompt 0: unscorable: KeyError: 'row0'")
    assert caplog.messages[0].endswith(f"; at {FRAMES[0]}")
    now = COUNT_EVERY_S
    log.note_failure(failure("last"), "prompt 500")
    log.note_failure(failure("last"), "prompt 501")
    (_, counted) = caplog.messages
    assert counted == (
        "unscorable: KeyError: 'last' in compute_score (mine.py:2): 501 samples so far"
    )


def test_each_reason_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    log.note_failure(failure("a"), "prompt 1")
    log.note_failure(Failed(FailureKind.SCORER_TIMEOUT, "no answer within 10 s"), "prompt 2")
    log.note("a.parquet, row 3: prompt: 45016 tokens", "prompts left out", "prompt 3")
    assert len(caplog.messages) == 3


def test_a_reason_is_what_stays_when_values_differ_and_the_line_of_the_file_counts() -> None:
    assert reason_of("row 3: 'a' is 17") == reason_of("row 9: 'b' is 2.5")
    assert reason_of("lost 0xdeadbeef: /a/b.py") == reason_of("lost 0xfeedbeef: /c/d-2.py")
    assert reason_of("10.0.0.1:7000 refused") == reason_of("10.0.0.2:34567 refused")
    assert reason_of("KeyError: 'a' in f (x.py:2)") != reason_of("KeyError: 'a' in f (x.py:9)")


def test_apostrophes_within_words_quote_nothing() -> None:
    """Two reasons whose only difference stands between two apostrophes are two."""
    assert reason_of("can't reach the judge, don't retry") != reason_of("can't parse, don't retry")
    assert reason_of("can't read 'a'") == reason_of("can't read 'b'")


@pytest.mark.parametrize("text", ["{}", "the answer {} isn't in the box", "Don't: {}", "Key: {}"])
def test_an_exception_at_one_place_is_one_reason_however_its_text_varies(text: str) -> None:
    one, other = (
        f"unscorable: ValueError: {text.format(words)} in compute_score (mine.py:2)"
        for words in ("red apples", "thirteen of my 'pears'")
    )
    assert reason_of(one) == reason_of(other)
    assert reason_of(f"3 of 8 samples failed, the first: {one}") == reason_of(other)
    assert reason_of(f"{one} (attempt 2)") == reason_of(other)
    assert reason_of(one) != reason_of(one.replace("ValueError", "KeyError"))
    assert reason_of(one) != reason_of(one.replace(":2)", ":3)"))


def test_many_kinds_of_failures_share_one_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = FailureLog(lambda: now)

    def words(number: int) -> str:
        return "".join(chr(ord("a") + int(digit)) for digit in str(number))

    for number in range(500):
        log.note(f"failed with {words(number)}", "samples", f"prompt {number}")
    assert len(caplog.messages) == MAX_REASONS + 1
    now = COUNT_EVERY_S
    log.note("failed with words", "samples", "prompt 500")
    assert caplog.messages[-1] == (
        f"more kinds of failures, such as failed with words: {501 - MAX_REASONS} samples so far"
    )


def test_an_exception_is_placed_in_the_authors_code_and_not_in_a_library() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("no json")
    assert "test_failure_log.py:" in place_of(caught.value)
    (frame,) = frame_texts(caught.value)
    assert frame.endswith('json.loads("no json")')
