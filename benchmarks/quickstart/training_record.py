"""The clock and the accuracy curve of one training run that stops at a target accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

StopReason = Literal["target", "max_batches", "max_seconds"]


class TrainingClock:
    """Wall-clock seconds of training; what happens inside `paused` is counted apart.

    Args:
        now: monotonic seconds; replaced in tests.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started_at: float | None = None
        self._paused_seconds = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._started_at = self._now()
        self._paused_seconds = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the block as evaluation."""
        began = self._now()
        try:
            yield
        finally:
            self._paused_seconds += self._now() - began

    @property
    def evaluation_seconds(self) -> float:
        """Seconds inside `paused`."""
        return self._paused_seconds

    @property
    def training_seconds(self) -> float:
        """Seconds since `start` outside `paused`; 0 before `start`."""
        if self._started_at is None:
            return 0.0
        return self._now() - self._started_at - self._paused_seconds


class AccuracyPoint(NamedTuple):
    """Held-out accuracy after `batch` train batches and `train_seconds` of training."""

    batch: int
    train_seconds: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run ends: at the accuracy, or without it after so many batches or seconds."""

    target: float
    max_batches: int
    max_seconds: float

    def reason_to_stop(self, batch: int, seconds: float, accuracy: float) -> StopReason | None:
        """Return why the run ends now, by the newest `accuracy`; ``None`` to continue."""
        if accuracy >= self.target:
            return "target"
        if batch >= self.max_batches:
            return "max_batches"
        return "max_seconds" if seconds >= self.max_seconds else None


@dataclass(slots=True)
class AccuracyCurve:
    """Held-out accuracies in the order they were measured; the first is the untrained one."""

    points: list[AccuracyPoint] = field(default_factory=list)

    def add(self, batch: int, train_seconds: float, accuracy: float) -> None:
        """Append a measurement, seconds rounded to milliseconds and accuracy to 1e-4."""
        self.points.append(AccuracyPoint(batch, round(train_seconds, 3), round(accuracy, 4)))

    def first_at(self, target: float) -> AccuracyPoint | None:
        """Return the first measurement at or above `target`, the untrained one included."""
        return next((point for point in self.points if point.accuracy >= target), None)
