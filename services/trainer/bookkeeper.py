"""Takes the run's books: asks everybody for counters at one moment and settles the accounts.

Consumes: counters of replicas (heartbeats, and answers when asked) and of the reward service, the
    phases of the run.
Waits for: their answers; each has a deadline.
Unblocked by: answers and deadlines; who does not answer is entered with what it told last.
Produces: the accounts by the names of `accounts.json`, also for status calls.
On failure: nothing of a run depends on its books; they have a residual then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from services.trainer.fleet import Fleet, Load
from services.trainer.received_tokens import ReceivedTokens
from services.trainer.run_state import RunState
from sluice.algorithm.accounts import RunBooks, run_books
from sluice.errors import SluiceError
from sluice.telemetry.process_age import process_age_s
from sluice.types import ReplicaInfo

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_PAUSE_S = 0.05


class Bookkeeper:
    """Keeps the books of one run.

    Args:
        fleet: its replicas.
        state: its phases; gets the accounts whenever they are taken.
        ask_replica: counters of one replica.
        ask_reward: statistics of the reward service.
        wall_s: age of this process, seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        state: RunState,
        *,
        ask_replica: Callable[[ReplicaInfo], Awaitable[Load]],
        ask_reward: Callable[[], Awaitable[Mapping[str, float]]],
        wall_s: Callable[[], float] = process_age_s,
    ) -> None:
        self._fleet, self._state, self._wall_s = fleet, state, wall_s
        self._ask_replica, self._ask_reward = ask_replica, ask_reward
        self._received = ReceivedTokens()

    async def take(self) -> Mapping[str, float]:
        """The accounts of about this moment: all are asked at once, and tokens go on flowing."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear_reward(), name="counters of the reward service")
            tasks.create_task(self._hear_fleet(), name="counters of the fleet")
        return self._publish(self.books())

    async def settle(self) -> Mapping[str, float]:
        """The accounts of one moment, for a run that has ended.

        The reward service is asked between two looks at the fleet, until nothing was sent between
        the two and all that was sent has been received; after some attempts the books stand in
        which least was sent.
        """
        kept, least = self.books(), float("inf")
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            await self._hear_fleet()
            sent_before = self._fleet.counters().sent_tokens
            await self._hear_reward()
            await self._hear_fleet()
            sent_between = self._fleet.counters().sent_tokens - sent_before
            books = self.books()
            if sent_between <= least:
                kept, least = books, sent_between
            if books.tokens is None or (sent_between == 0 and books.tokens.residual == 0):
                break
        return self._publish(kept)

    def close(self, settled: Mapping[str, float]) -> Mapping[str, float]:
        """Settled accounts with the trainer's seconds as they stand by now."""
        trainer = self.books().as_mapping()
        return {
            **settled,
            **{name: trainer[name] for name in trainer if name.startswith("trainer_")},
        }

    def books(self) -> RunBooks:
        """The accounts as far as counters are known."""
        phases = {str(phase): spent for phase, spent in self._state.seconds_by_phase().items()}
        return run_books(self._fleet.counters(), self._received.by_fate(), phases, self._wall_s())

    def _publish(self, books: RunBooks) -> Mapping[str, float]:
        self._state.accounts = books.as_mapping()
        return self._state.accounts

    async def _hear_reward(self) -> None:
        try:
            self._received.update(await self._ask_reward())
        except SluiceError as error:
            logger.debug("its last counters stand: %s", error)

    async def _hear_fleet(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self._fleet.members():
                tasks.create_task(self._hear(member.info), name=f"counters of {member.info.name}")

    async def _hear(self, replica: ReplicaInfo) -> None:
        try:
            self._fleet.note_counters(replica, await self._ask_replica(replica))
        except SluiceError as error:
            logger.debug("its last heartbeat stands: %s", error)
