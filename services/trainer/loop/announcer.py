"""Announcements of the policy to the reward service, one at a time and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunState
from sluice.algorithm.routing import AnnouncedReplica
from sluice.types import DataProgress

if TYPE_CHECKING:
    from services.trainer.loop.reward_client import RewardClient

CurrentProgress: TypeAlias = Callable[[], DataProgress | None]
"""Returns the position in the data set, or None before the first batch of a new run."""


class PolicyAnnouncer:
    """The reward service's knowledge of the current version and its replicas.

    A version is announced only after the batch that it was trained on is acknowledged, and never an
    older version after a newer one.

    Args:
        progress: the position in the data set, with the batch in hand counted as trained; read for
            each announcement. A restarted reward service continues there and samples no prompt of
            that batch again; a service that did not restart ignores it.
    """

    def __init__(
        self, reward: RewardClient, fleet: Fleet, state: RunState, progress: CurrentProgress
    ) -> None:
        self._reward = reward
        self._fleet = fleet
        self._state = state
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[int, tuple[AnnouncedReplica, ...]] | None = None
        self._rollback = (-1, -1)  # a version, and the one whose weights it has

    async def announce(
        self,
        *,
        after: Callable[[], Awaitable[None]] | None = None,
        rolled_back_to: int | None = None,
    ) -> None:
        """Announce a changed version or changed replicas; do nothing before the first version.

        Args:
            after: awaited first, while no other announcement can be made.
            rolled_back_to: the version has the weights of this earlier one. Later announcements of
                the same version repeat it, for a service that restarts.
        """
        async with self._one_at_a_time:
            if after is not None:
                await after()
            # Read under the lock: an announcement that had to wait reports the newest version.
            version = self._state.version
            if version is None:
                return
            current = (version, self._fleet.announced())
            if current == self._last:
                return
            if rolled_back_to is not None:
                self._rollback = (version, rolled_back_to)
            restored = self._rollback[1] if self._rollback[0] == version else None
            await self._reward.announce(*current, self._progress, restored)
            self._last = current
