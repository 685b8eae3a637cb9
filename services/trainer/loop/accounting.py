"""Account for every prompt, token and second of the run from the counters of replicas and the
reward service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from services.trainer.fleet.members import Fleet
from services.trainer.loop.run_state import RunState
from sluice.algorithm.accounting import (
    RECEIVED,
    Account,
    ReplicaCounters,
    RunAccounts,
    TokenReading,
    run_accounts,
)
from sluice.errors import SluiceError
from sluice.telemetry.process import process_age_s
from sluice.types import ReplicaInfo

_ENDS = ("trained", "filtered_", "dropped_", "skipped")


def acknowledged_groups(accounts: Mapping[str, float]) -> float:
    """Groups that the reward service knows as trained since its start."""
    return accounts.get("groups_acknowledged", accounts.get("trained", 0.0))


def settled_accounts(
    accounts: Mapping[str, float], *, groups_trained: int, acknowledged_before: float
) -> dict[str, float]:
    """The accounts with the trainer's own count beside them.

    Args:
        accounts: the reward service's, as `RewardClient.accounts` gives them.
        groups_trained: groups of all batches that this trainer has trained.
        acknowledged_before: `acknowledged_groups` before this trainer's first batch.

    Returns:
        `accounts` with ``groups_trained``, ``groups_acknowledged`` (what the reward service knows
        as trained by this trainer) and ``prompts_lost``: what the reward service has lost, prompts
        that neither ended nor are pending, and the difference between the two counts, added up.
        0 in a run that kept its books.
    """
    acknowledged = acknowledged_groups(accounts) - acknowledged_before
    ended = sum(count for name, count in accounts.items() if name.startswith(_ENDS))
    unexplained = accounts.get("submitted", 0.0) - ended - accounts.get("pending", 0.0)
    lost = abs(accounts.get("prompts_lost", 0.0))
    return {
        **accounts,
        "groups_trained": float(groups_trained),
        "groups_acknowledged": acknowledged,
        "prompts_lost": lost + abs(unexplained) + abs(groups_trained - acknowledged),
    }


_PREFIX = "reward/tokens/"
_TOTAL = f"{_PREFIX}received"
_PENDING, _ABORTED = "pending", "aborted"


class TokensAcrossRestarts:
    """Adds up what services that started one after the other have counted.

    A service that starts anew counts from 0. What the one before held at the time, nobody trains
    on any more: it counts as aborted. What that one counted after it was last asked is not known.
    """

    def __init__(self) -> None:
        self._earlier = Counter[str]()
        self._latest: Mapping[str, float] | None = None
        self._latest_total = 0.0

    def update(self, statistics: Mapping[str, float]) -> None:
        """Takes a service's statistics; ones without token counts change nothing."""
        total = statistics.get(_TOTAL)
        if total is None:
            return
        if self._latest is not None and total < self._latest_total:
            lost = dict(self._latest)
            lost[_ABORTED] += lost.pop(_PENDING)
            self._earlier.update(lost)
        self._latest_total = total
        self._latest = {name: statistics.get(_PREFIX + name, 0.0) for name in RECEIVED}

    def by_use(self) -> Mapping[str, float] | None:
        """Tokens by what became of them (`RECEIVED`); None before any were told."""
        if self._latest is None:
            return None
        return {name: self._earlier[name] + count for name, count in self._latest.items()}


# Takes the run's books: asks everybody for counters and settles the accounts.
#
# They cannot all be asked at one moment. So the fleet is asked between two looks at the reward
# service (`TokenReading`); if somebody does not answer, the tokens of the last time that all did
# stand, with their age.
#
# Consumes: counters of replicas (heartbeats, and answers when asked) and of the reward service, the
#     phases of the run.
# Waits for: their answers; each has a deadline.
# Unblocked by: answers and deadlines; who does not answer is entered with what it told last.
# Produces: the accounts by the names of `accounts.json`, also for status calls.
# On failure: nothing of a run depends on its books; they have a residual then.

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_PAUSE_S = 0.05
# A step that is shorter than this waits so long at most for its books, whoever hangs.
_LONGEST_TAKE_S = 2.0


class RunAccountant:
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
        ask_replica: Callable[[ReplicaInfo], Awaitable[ReplicaCounters]],
        ask_reward: Callable[[], Awaitable[Mapping[str, float]]],
        wall_s: Callable[[], float] = process_age_s,
    ) -> None:
        self._fleet, self._state, self._wall_s = fleet, state, wall_s
        self._ask_replica, self._ask_reward = ask_replica, ask_reward
        self._received = TokensAcrossRestarts()
        # Its answers are taken in the order in which it gave them.
        self._reward_turn = asyncio.Lock()
        self._tokens: Account | None = None
        self._tokens_moved, self._tokens_read_s = 0, 0.0

    async def take(self) -> Mapping[str, float]:
        """The accounts of about this moment, while tokens go on flowing."""
        reading = None
        try:
            async with asyncio.timeout(_LONGEST_TAKE_S):
                reading = await self._read()
        except TimeoutError:
            logger.debug("who has not answered within %g s stands as before", _LONGEST_TAKE_S)
        if reading is not None:
            self._keep(reading.account(), reading.moved_tokens)
        age_s = time.monotonic() - self._tokens_read_s
        return self._publish(
            replace(
                self.accounting(),
                tokens=self._tokens,
                tokens_age_s=age_s,
                tokens_moved=self._tokens_moved,
            )
        )

    async def _read(self) -> TokenReading | None:
        """None if somebody did not answer: nothing is known of that one's present tokens."""
        before = await self._hear_reward()
        all_answered = await self._hear_fleet()
        fleet = self._fleet.counters()
        if before is None or not all_answered:
            return None
        after = await self._hear_reward()
        if after is None:
            return None
        reading = TokenReading(before, fleet, after)
        if reading.account().residual > 0:
            # Sent and not received: on the wire for some milliseconds, or lost for good.
            after = await self._hear_reward() or after
        return TokenReading(before, fleet, after)

    async def settle(self) -> Mapping[str, float]:
        """The accounts of one moment, for a run that has ended.

        The reward service is asked between two looks at the fleet, until nothing was sent between
        the two and all that was sent has been received; after some attempts the books stand in
        which least was sent.
        """
        kept, least = self.accounting(), float("inf")
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            await self._hear_fleet()
            sent_before = self._fleet.counters().sent_tokens
            await self._hear_reward()
            await self._hear_fleet()
            sent_between = self._fleet.counters().sent_tokens - sent_before
            accounting = self.accounting()
            if sent_between <= least:
                kept, least = accounting, sent_between
            if accounting.tokens is None or (sent_between == 0 and accounting.tokens.residual == 0):
                break
        if kept.tokens is not None:
            self._keep(kept.tokens, moved=0)
        return self._publish(kept)

    def close(self, settled: Mapping[str, float]) -> Mapping[str, float]:
        """Settled accounts with the trainer's seconds as they stand by now."""
        trainer = self.accounting().as_mapping()
        return {
            **settled,
            **{name: trainer[name] for name in trainer if name.startswith("trainer_")},
        }

    def accounting(self) -> RunAccounts:
        """The accounts as far as counters are known."""
        phases = {str(phase): spent for phase, spent in self._state.seconds_by_phase().items()}
        return run_accounts(self._fleet.counters(), self._received.by_use(), phases, self._wall_s())

    def _keep(self, tokens: Account, moved: int) -> None:
        self._tokens, self._tokens_moved = tokens, moved
        self._tokens_read_s = time.monotonic()

    def _publish(self, accounting: RunAccounts) -> Mapping[str, float]:
        self._state.accounts = accounting.as_mapping()
        return self._state.accounts

    async def _hear_reward(self) -> Mapping[str, float] | None:
        """Its tokens by what became of them; None if it does not answer or counts none."""
        async with self._reward_turn:
            try:
                self._received.update(await self._ask_reward())
            except SluiceError as error:
                logger.debug("its last counters stand: %s", error)
                return None
            return self._received.by_use()

    async def _hear_fleet(self) -> bool:
        """Whether all have answered."""
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._hear(member.info), name=f"counters of {member.info.name}")
                for member in self._fleet.members()
            ]
        return all(task.result() for task in asked)

    async def _hear(self, replica: ReplicaInfo) -> bool:
        try:
            self._fleet.note_counters(replica, await self._ask_replica(replica))
        except SluiceError as error:
            logger.debug("its last heartbeat stands: %s", error)
            return False
        return True
