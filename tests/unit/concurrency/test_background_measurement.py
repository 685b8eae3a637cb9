"""A measurement that hangs keeps nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from sluice.concurrency.threads import BackgroundMeasurement

WAIT_S = 60.0


def test_the_latest_result_is_returned_and_none_after_an_error() -> None:
    results: Iterator[int | None] = iter([1, 2, None])

    def measure() -> int:
        found = next(results)
        if found is None:
            raise OSError("gone")
        return found

    measurement = BackgroundMeasurement("numbers", measure)
    assert [measurement.latest(WAIT_S) for _ in range(3)] == [1, 2, None]


def test_while_a_measurement_hangs_the_result_before_it_is_returned() -> None:
    hangs, proceed = threading.Event(), threading.Event()
    num_measured = 0

    def measure() -> int:
        nonlocal num_measured
        num_measured += 1
        if num_measured > 1:
            hangs.set()
            proceed.wait(60)
        return num_measured

    measurement = BackgroundMeasurement("numbers", measure)
    assert measurement.latest(WAIT_S) == 1
    assert measurement.latest() == 1
    assert hangs.wait(WAIT_S)
    assert measurement.latest(0.01) == 1
    assert num_measured == 2  # no further thread while one hangs
    proceed.set()
    assert measurement.latest(WAIT_S) in (2, 3)
