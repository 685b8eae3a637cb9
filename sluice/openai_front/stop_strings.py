"""Ends a text before the first of some strings, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Takes a text piece by piece; holds back what may be the beginning of a stop string.

    What `push` and `flush` return adds up to the text before the earliest stop string, or to all of
    it without one. Of two that begin at the same place it makes no difference which ends the text.

    Args:
        stops: not empty each; none at all passes everything on at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What of the text so far may be passed on now; nothing once it has stopped."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
