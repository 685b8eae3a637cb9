"""When work that stands still is told of, and when it is given up; a function of what was seen.

Time counts only while this process runs: one that a signal stopped, or whose machine slept, is not
blamed for the time in which it could not move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_MOST_LOOKS_MISSED = 3


@dataclass(frozen=True, slots=True)
class WorkState:
    """The state of a process's work.

    Attributes:
        progress: a value that differs whenever something moved.
        has_work: whether something should move; a paused or idle process has none.
        patience_s: how long the present wait may last by its own deadline, seconds; that one is
            left to end it.
    """

    progress: object
    has_work: bool = True
    patience_s: float = 0.0


class Verdict(StrEnum):
    """What a look found."""

    FINE = "fine"
    STALLED = "stalled"
    HOPELESS = "hopeless"


class StallJudge:
    """Sees sightings, which come as long as the event loop runs, and judges.

    `beat` belongs to the event loop, all else to one other thread.

    Args:
        stall_s: seconds without progress that are told of; ``None``: none are.
        give_up_s: seconds without progress after which there is no hope; ``None``: there always is.
        interval_s: seconds between two looks, and between two beats.
    """

    def __init__(self, stall_s: float | None, give_up_s: float | None, interval_s: float) -> None:
        self._stall_s, self._give_up_s, self._interval_s = stall_s, give_up_s, interval_s
        self._beat: tuple[int, WorkState] | None = None
        self._seen: tuple[int, WorkState] | None = None
        self._looked_s: float | None = None
        # Seconds that count, in sum; and where they stood when something moved, or a beat came.
        self._lived_s = self._moved_at_s = self._beaten_at_s = 0.0
        self._is_reported = False

    def beat(self, work_state: WorkState) -> None:
        """The event loop runs and finds this."""
        self._beat = (0 if self._beat is None else self._beat[0] + 1, work_state)

    def look(self, now_s: float) -> Verdict:
        """Judges; `STALLED` once in each stall."""
        self._live_until(now_s)
        beat, seen = self._beat, self._seen
        if beat is None:
            return Verdict.FINE
        if seen is None or beat[0] != seen[0]:
            self._seen, self._beaten_at_s = beat, self._lived_s
            if seen is None or not beat[1].has_work or beat[1].progress != seen[1].progress:
                self._moved_at_s, self._is_reported = self._lived_s, False
        return self._judge()

    @property
    def still_s(self) -> float:
        """Seconds that count since something moved or there was nothing to do."""
        return self._lived_s - self._moved_at_s

    @property
    def still_at_work_s(self) -> float | None:
        """The same, or ``None`` while there is nothing to do."""
        seen = self._seen
        return self.still_s if seen is not None and seen[1].has_work else None

    @property
    def blocked_s(self) -> float:
        """Seconds that count since the event loop ran; about 0 while it does."""
        missed_s = self._lived_s - self._beaten_at_s
        return missed_s if missed_s > _MOST_LOOKS_MISSED * self._interval_s else 0.0

    def _live_until(self, now_s: float) -> None:
        if self._looked_s is not None:
            most_s = _MOST_LOOKS_MISSED * self._interval_s
            self._lived_s += min(now_s - self._looked_s, most_s)
        self._looked_s = now_s

    def _judge(self) -> Verdict:
        seen = self._seen
        assert seen is not None
        patience_s = 0.0 if self.blocked_s else seen[1].patience_s
        if self._give_up_s is not None and self.still_s >= max(
            self._give_up_s, patience_s + (self._stall_s or 0.0) if patience_s else 0.0
        ):
            return Verdict.HOPELESS
        if self._stall_s is not None and self.still_s >= self._stall_s and not self._is_reported:
            self._is_reported = True
            return Verdict.STALLED
        return Verdict.FINE
