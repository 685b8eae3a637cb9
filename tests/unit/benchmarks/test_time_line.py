"""The time line of a pipeline: its bubble, and its picture."""

from __future__ import annotations

import pytest

from benchmarks.trainer.stage_peer import TimedPass
from benchmarks.trainer.time_line import TimeLine, picture

# Passes of one second by stage, forward 0 and 1, backward a and b; a dot is a second of waiting.
TWO_STAGES = ("01.a.b", ".0a1b.")


def drawn(*stages: str) -> TimeLine:
    passes = [
        [
            TimedPass("01ab".index(one) % 2, one in "ab", 7.0 + second, 8.0 + second)
            for second, one in enumerate(stage)
            if one != "."
        ]
        for stage in stages
    ]
    return TimeLine(2, passes)


def test_passes_without_delay_wait_as_the_formula_says() -> None:
    line = drawn(*TWO_STAGES)
    assert (line.bubble, line.formula) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_a_late_stage_is_seen() -> None:
    assert drawn("01..a.b", ".0.a1b.").bubble > 0.4


def test_the_picture_has_a_box_and_a_number_for_each_pass() -> None:
    text = picture(drawn(*TWO_STAGES))
    assert text.count('stroke="#fff"') == 8
    assert text.count(">2<") == 4
    assert "33.3% of the time waits" in text
