"""Tells the reward service which version is served by whom, once for each change.

Announcements have an order: a version only after the batch it was trained from is acknowledged,
and never an older version after a newer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.trainer.fleet import Fleet, MemberState
from services.trainer.run_state import RunState
from sluice.types import DataProgress, ReplicaInfo


class AnnounceCall(Protocol):
    """The reward service's end."""

    async def __call__(
        self,
        version: int,
        replicas: Sequence[ReplicaInfo],
        progress: Callable[[], DataProgress | None],
        /,
    ) -> None:
        """Makes the announcement known, again and with the latest progress to who forgot it."""
        ...


class PolicyAnnouncer:
    """Announces what `state` and `fleet` say at the moment.

    Args:
        send: the reward service's end.
        fleet: who serves.
        state: which version.
        progress: where the data set stands, with the batch in hand counted as trained; told every
            time. A reward service that starts anew goes on from there and draws no prompt of that
            batch again; any other one ignores it. None before the first batch of a run from the
            start.
    """

    def __init__(
        self,
        send: AnnounceCall,
        fleet: Fleet,
        state: RunState,
        progress: Callable[[], DataProgress | None],
    ) -> None:
        self._send, self._fleet, self._state = send, fleet, state
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[int, tuple[ReplicaInfo, ...]] | None = None

    async def announce(self, *, after: Callable[[], Awaitable[None]] | None = None) -> None:
        """Announces if version or serving replicas have changed; nothing before a first version.

        Args:
            after: done first, while no other announcement can be made.
        """
        async with self._one_at_a_time:
            if after is not None:
                await after()
            version = self._state.version
            if version is None:
                return
            current = (version, self._fleet.in_state(MemberState.SERVING))
            if current == self._last:
                return
            await self._send(*current, self._progress)
            self._last = current
