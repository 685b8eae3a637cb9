"""Clock, curve and bounds of a benchmark run."""

from __future__ import annotations

import pytest

from benchmarks.training_record import AccuracyCurve, AccuracyPoint, Bounds, TrainingClock


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_evaluation_stops_the_training_clock() -> None:
    now = FakeTime()
    clock = TrainingClock(now)
    clock.start()
    now.seconds += 7.0
    with clock.paused():
        now.seconds += 30.0
    now.seconds += 2.0
    assert clock.training_seconds == pytest.approx(9.0)
    assert clock.evaluation_seconds == pytest.approx(30.0)


def test_a_failing_evaluation_is_still_not_training() -> None:
    now = FakeTime()
    clock = TrainingClock(now)
    clock.start()

    def evaluate() -> None:
        with clock.paused():
            now.seconds += 5.0
            raise RuntimeError("no accuracy")

    with pytest.raises(RuntimeError, match="no accuracy"):
        evaluate()
    assert clock.training_seconds == 0.0


def test_set_up_before_the_start_is_not_training() -> None:
    now = FakeTime()
    clock = TrainingClock(now)
    now.seconds += 50.0
    assert clock.training_seconds == 0.0
    clock.start()
    now.seconds += 1.0
    assert clock.training_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("batch", "seconds", "accuracy", "reason"),
    [
        (10, 5.0, 0.84, None),
        (10, 5.0, 0.85, "target"),
        (60, 5.0, 0.84, "max_batches"),
        (10, 900.0, 0.84, "max_seconds"),
        (60, 900.0, 0.9, "target"),
    ],
)
def test_a_run_ends_at_the_target_or_at_a_bound(
    batch: int, seconds: float, accuracy: float, reason: str | None
) -> None:
    bounds = Bounds(target=0.85, max_batches=60, max_seconds=900.0)
    assert bounds.reason_to_stop(batch, seconds, accuracy) == reason


def test_the_target_is_reached_at_its_first_measurement() -> None:
    curve = AccuracyCurve()
    for batch, accuracy in ((0, 0.2), (5, 0.86), (10, 0.84), (15, 0.9)):
        curve.add(batch, batch * 2.0, accuracy)
    assert curve.first_at(0.85) == AccuracyPoint(5, 10.0, 0.86)
    assert curve.first_at(0.95) is None
