"""Ends a stream whose replica is withdrawn or of which nothing comes, and a group at its bounds.

Consumes: what the stream brings, as it arrives. Waits for: nothing itself; it moves the deadline of
the scope in which the stream is read. Produces: the reason for the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from enum import StrEnum

from services.reward.collected_group import Arrival
from sluice.algorithm.routing import Member
from sluice.algorithm.stragglers import StragglerRules, StreamPace


class StreamEnd(StrEnum):
    """Why a stream ended without an error."""

    COMPLETE = "complete"
    REPLICA_REMOVED = "withdrawn"
    STALLED = "stalled"
    SLOW = "slow"
    GROUP_OVER = "group over"


class StreamWatch:
    """One stream.

    Args:
        scope: in which it is read.
        member: its replica.
        rules: when to give up.
        over_at: when its group has taken its time; ``None``: not known, or never.
        sample_indexes: what was asked for.
        now: seconds of the event loop's clock.
    """

    def __init__(
        self,
        scope: asyncio.Timeout,
        member: Member,
        rules: StragglerRules,
        over_at: float | None,
        sample_indexes: Collection[int],
        now: float,
    ) -> None:
        self._scope, self._member, self._rules = scope, member, rules
        self._begun, self._over_at = now, over_at
        self.pace = StreamPace.begun(sample_indexes, now)
        self._reschedule()

    def accepted(self, now: float) -> None:
        """The replica has taken the request."""
        self.pace.accepted(now)
        self._reschedule()

    def bounded(self, over_at: float | None) -> None:
        """Its group is over at `over_at`."""
        self._over_at = over_at
        self._reschedule()

    def arrived(self, arrival: Arrival, now: float) -> None:
        """Tokens came, or samples ended."""
        self.pace.arrived(arrival.new_tokens, arrival.ended, now)
        self._reschedule()

    def engine_progressed(self, engine_tokens: int, now: float) -> None:
        """The replica says that it draws tokens while samples wait for its slots."""
        self.pace.engine_progressed(engine_tokens, now)
        self._reschedule()

    def removed(self, now: float) -> None:
        """The replica has left the fleet: end the stream."""
        if not self._scope.expired():
            self._scope.reschedule(now)

    def why_expired(self, now: float) -> StreamEnd:
        """Why the scope ended the stream."""
        if self._member.removed:
            return StreamEnd.REPLICA_REMOVED
        is_over = self._over_at is not None and now >= self._over_at
        return StreamEnd.GROUP_OVER if is_over else StreamEnd.STALLED

    def state(self, now: float) -> str:
        """How far it is, for the log."""
        pace = self.pace
        without = f", {sorted(pace.waiting)}" if pace.waiting else ""
        quietest = pace.quietest(now)
        silent = f", of these {quietest[0]} is silent for {quietest[1]:.1f} s" if quietest else ""
        return (
            f"nothing for {now - pace.last_progress:.1f} s, stream of {now - self._begun:.1f} s "
            f"with {pace.num_tokens} tokens; {len(pace.waiting)} samples without any{without}, "
            f"{len(pace.running)} running{silent}, {pace.num_finished} ended"
        )

    def _reschedule(self) -> None:
        # The end of a withdrawn stream is set already.
        if self._member.removed or self._scope.expired():
            return
        ends = (self._rules.stalled_at(self.pace), self._over_at)
        self._scope.reschedule(min((end for end in ends if end is not None), default=None))
