"""How long the stages of an update take."""

from __future__ import annotations

from collections.abc import Callable


class PhaseTimer:
    """Seconds between laps, by name.

    Args:
        now_s: a clock, seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s, self._last_s = now_s, now_s()
        self.seconds: dict[str, float] = {}

    def end_phase(self, name: str, *, shown: bool = True) -> None:
        """Ends a lap, whose seconds are added to others of the name; if not shown it is dropped."""
        now_s = self._now_s()
        if shown:
            self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
