"""Where a replica's time goes: every second of the process belongs to one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum


class EngineState(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"  # until the first weights serve
    GENERATING = "generating"  # prefill and decode
    IDLE = "idle"  # nothing to run
    SWAPPING = "swapping"  # weights are exchanged; no token is sampled


class StateClock:
    """Seconds by state. One thread enters states, any thread reads.

    Args:
        elapsed_s: seconds that have passed already; they are spent on starting.
        now_s: a monotonic clock, seconds.
    """

    def __init__(self, elapsed_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        # Replaced as a whole, so that a reader in another thread never sees half of a change.
        self._account: tuple[EngineState, float, dict[EngineState, float]] = (
            EngineState.STARTING,
            now_s() - elapsed_s,
            {},
        )

    @property
    def state(self) -> EngineState:
        """The current state."""
        return self._account[0]

    def enter(self, state: EngineState) -> None:
        """Enter a state; nothing happens if it is the current one."""
        before, since_s, seconds = self._account
        if state is before:
            return
        now_s = self._now_s()
        spent = {**seconds, before: seconds.get(before, 0.0) + now_s - since_s}
        self._account = (state, now_s, spent)

    def seconds_by_state(self) -> Mapping[str, float]:
        """Return the seconds of every state so far, the current one included."""
        state, since_s, seconds = self._account
        totals = {str(one): seconds.get(one, 0.0) for one in EngineState}
        totals[state] += self._now_s() - since_s
        return totals
