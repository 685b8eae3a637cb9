"""Warnings that prompts wait for room, so that a wait without an end is not a silent one."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_MOST_CHARACTERS = 500


class HoldWarnings:
    """Warns of the first prompt that is held, and after pauses of 30 s, 1, 2, ... minutes, up to an
    hour, if one is held then: a submission that gets on by small steps is not talked over."""

    def __init__(self) -> None:
        self._next_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def held(self, num_held: int, detail: str, now_s: float, full_for_s: float) -> None:
        """A prompt was refused for want of room, and waits.

        Args:
            num_held: prompts that wait, it among them.
            detail: why the service refused it.
            now_s: seconds, monotonic.
            full_for_s: seconds since a prompt got on, or since the first one was refused.
        """
        if self._next_s is not None:
            if now_s < self._next_s:
                return
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_s = now_s + self._pause_s
        logger.warning(
            "prompts that wait for room: %d; nothing got on for %.0f s; the service says: %s",
            num_held,
            full_for_s,
            _on_one_line(detail),
        )


def _on_one_line(detail: str) -> str:
    """A terminal may be what shows it."""
    return "".join(c if c.isprintable() else " " for c in detail[:_MOST_CHARACTERS])
