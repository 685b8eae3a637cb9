"""Account for every prompt, token and second of the run, from counters of replicas and the reward
service.

The peers cannot all be asked at the same moment. So the fleet is read between two answers of the
reward service (`TokenReading`). If a peer does not answer, the token counts of the last complete
reading stay, with their age.

Consumes: counters of replicas (from heartbeats and on request) and of the reward service, and the
    phases of the run.
Waits for: the answers; each has a deadline.
Unblocked by: answers and deadlines; a peer that does not answer counts with its last report.
Produces: the accounts by their names in `accounts.json`, also for status calls.
On failure: nothing in a run depends on its accounts; they have a residual then.
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
    with_tokens_before_restart,
)
from sluice.concurrency.process import process_age_s
from sluice.errors import SluiceError
from sluice.types import ReplicaInfo

logger = logging.getLogger(__name__)

ACKNOWLEDGED = "groups_acknowledged"
_ATTEMPTS = 10
_PAUSE_S = 0.05
# Longest wait of a step for its accounts, even if a peer hangs.
_LONGEST_TAKE_S = 2.0
_LONGEST_SETTLE_S = 4.0  # and what one more attempt takes
_PREFIX = "reward/tokens/"
_TOTAL = f"{_PREFIX}received"
_PENDING = "pending"
_ABORTED = "aborted"
_ENDS = ("trained", "filtered_", "dropped_", "skipped")


def settled_accounts(
    accounts: Mapping[str, float], *, groups_trained: int, acknowledged_before: float
) -> dict[str, float]:
    """Return the reward service's accounts and the trainer's own count.

    Args:
        accounts: from `RewardClient.accounts`.
        groups_trained: groups of all batches that this trainer has trained.
        acknowledged_before: their ``groups_acknowledged`` before this trainer's first batch.

    Returns:
        `accounts` with ``groups_trained``, ``groups_acknowledged`` (the reward service's count of
        groups that this trainer has trained) and ``prompts_lost``, a sum: prompts
        that the reward service has lost, prompts that neither ended nor are pending, and the
        difference between the two counts of groups. It is 0 if nothing is missing.
    """
    acknowledged = accounts[ACKNOWLEDGED] - acknowledged_before
    ended = sum(count for name, count in accounts.items() if name.startswith(_ENDS))
    unexplained = accounts["submitted"] - ended - accounts["pending"]
    lost = abs(accounts["prompts_lost"])
    return {
        **accounts,
        "groups_trained": float(groups_trained),
        ACKNOWLEDGED: acknowledged,
        "prompts_lost": lost + abs(unexplained) + abs(groups_trained - acknowledged),
    }


class TokensAcrossRestarts:
    """The sum of the token counts of a reward service over its restarts.

    A restarted service counts from 0. Tokens that it held before will not be trained: they count as
    aborted. Counts between its last answer and its end are unknown.
    """

    def __init__(self) -> None:
        self._earlier = Counter[str]()
        self._latest: Mapping[str, float] | None = None
        self._latest_total = 0.0

    def update(self, statistics: Mapping[str, float]) -> bool:
        """Add the service's statistics; return whether it has restarted.

        Without token counts they change nothing.
        """
        total = statistics.get(_TOTAL)
        if total is None:
            return False
        has_restarted = self._latest is not None and total < self._latest_total
        if self._latest is not None and has_restarted:
            lost = dict(self._latest)
            lost[_ABORTED] += lost.pop(_PENDING)
            self._earlier.update(lost)
        self._latest_total = total
        self._latest = {name: statistics.get(_PREFIX + name, 0.0) for name in RECEIVED}
        return has_restarted

    def by_use(self) -> Mapping[str, float] | None:
        """Return tokens by their use (`RECEIVED`); None before the first report."""
        if self._latest is None:
            return None
        return {name: self._earlier[name] + count for name, count in self._latest.items()}


class RunAccountant:
    """The accounts of one run.

    Args:
        state: has the phases; gets the accounts whenever they are taken.
        has_restarted: whether an earlier process of this trainer met the same peers.
    """

    def __init__(
        self,
        fleet: Fleet,
        state: RunState,
        ask_replica: Callable[[ReplicaInfo], Awaitable[ReplicaCounters]],
        ask_reward: Callable[[], Awaitable[Mapping[str, float]]],
        *,
        wall_s: Callable[[], float] = process_age_s,
        has_restarted: bool = False,
    ) -> None:
        self._fleet = fleet
        self._state = state
        self._wall_s = wall_s
        self._ask_replica = ask_replica
        self._ask_reward = ask_reward
        self._received = TokensAcrossRestarts()
        self._has_restarted = has_restarted
        self._reward_has_restarted = False
        self._known_replicas: frozenset[str] | None = None
        self._answered = set[str]()  # replicas whose counters came, at least once
        self._before_restart: float | None = None
        # Keeps the answers of the reward service in order.
        self._reward_turn = asyncio.Lock()
        self._tokens: Account | None = None
        self._tokens_moved = 0
        self._tokens_read_s = 0.0

    async def take(self) -> Mapping[str, float]:
        """Return approximate accounts of this moment, while generation continues."""
        reading = None
        try:
            async with asyncio.timeout(_LONGEST_TAKE_S):
                reading = await self._read()
        except TimeoutError:
            logger.debug("not every peer has answered within %g s", _LONGEST_TAKE_S)
        if reading is not None:
            tokens = self._since_restart(
                reading.account(), reading.max_residual, has_restarted=self._take_restart()
            )
            self._keep_tokens(tokens, reading.moved_tokens)
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
        """Read all token counts; return None if a peer did not answer."""
        reward_before = await self._ask_reward_counters()
        all_answered = await self._ask_fleet_counters()
        fleet = self._fleet.counters()
        if reward_before is None or not all_answered:
            return None
        reward_after = await self._ask_reward_counters()
        if reward_after is None:
            return None
        reading = TokenReading(reward_before, fleet, reward_after)
        if reading.account().residual > 0:
            # Tokens were sent and not received: they are on the wire, or lost. Ask again to see.
            reward_after = await self._ask_reward_counters() or reward_after
        return TokenReading(reward_before, fleet, reward_after)

    async def settle(self) -> Mapping[str, float]:
        """Return the accounts of one moment, for a run that has ended.

        Ask the reward service between two readings of the fleet, until no token was sent between
        them and every sent token was received. After some attempts or seconds, keep the reading
        during which the fewest tokens were sent.
        """
        calmest, min_sent, has_restarted = self.accounting(), float("inf"), False
        ends_s = time.monotonic() + _LONGEST_SETTLE_S
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            await self._ask_fleet_counters()
            sent_before = self._fleet.counters().sent_tokens
            await self._ask_reward_counters()
            await self._ask_fleet_counters()
            sent_between = self._fleet.counters().sent_tokens - sent_before
            accounting = self.accounting()
            has_restarted |= self._take_restart()
            if accounting.tokens is not None:
                tokens = self._since_restart(
                    accounting.tokens, accounting.tokens.residual, has_restarted=has_restarted
                )
                accounting = replace(accounting, tokens=tokens)
            if sent_between <= min_sent:
                calmest, min_sent = accounting, sent_between
            if accounting.tokens is None or (sent_between == 0 and accounting.tokens.residual == 0):
                break
            if time.monotonic() >= ends_s:
                break
        if calmest.tokens is not None:
            self._keep_tokens(calmest.tokens, moved=0)
        return self._publish(calmest)

    def close(self, settled: Mapping[str, float]) -> Mapping[str, float]:
        """Return the settled accounts with the trainer's seconds up to now."""
        trainer = self.accounting().as_mapping()
        return {
            **settled,
            **{name: trainer[name] for name in trainer if name.startswith("trainer_")},
        }

    def accounting(self) -> RunAccounts:
        """Return the accounts from the counters known so far."""
        phases = {str(phase): spent for phase, spent in self._state.seconds_by_phase().items()}
        return run_accounts(self._fleet.counters(), self._received.by_use(), phases, self._wall_s())

    def _take_restart(self) -> bool:
        """Return whether a process has restarted, or met a restarted one, since the last call.

        A restarted trainer meets its replicas one by one, each with the tokens that it has sampled
        so far; a restarted reward service has lost the counts of them.
        """
        members = {member.info.instance_id for member in self._fleet.members()}
        # Not one that has registered since the fleet was asked: its tokens are in no reading yet.
        replicas = frozenset(self._answered & members)
        is_new = self._has_restarted and replicas != self._known_replicas
        self._known_replicas = replicas
        is_new, self._reward_has_restarted = is_new or self._reward_has_restarted, False
        return is_new

    def _since_restart(
        self, tokens: Account, max_residual: float, *, has_restarted: bool
    ) -> Account:
        """Return the account without what processes counted before a restart.

        Each reading bounds that from above: it may miss tokens that are on the wire, or that came
        while it was taken. So the least of them counts.
        """
        if has_restarted:
            self._before_restart = max_residual
        if self._before_restart is None:
            return tokens
        self._before_restart = min(self._before_restart, max_residual)
        return with_tokens_before_restart(tokens, self._before_restart)

    def _keep_tokens(self, tokens: Account, moved: int) -> None:
        self._tokens, self._tokens_moved = tokens, moved
        self._tokens_read_s = time.monotonic()

    def _publish(self, accounting: RunAccounts) -> Mapping[str, float]:
        self._state.accounts = accounting.as_mapping()
        return self._state.accounts

    async def _ask_reward_counters(self) -> Mapping[str, float] | None:
        """Return its tokens by their use; None if it does not answer or counts none."""
        async with self._reward_turn:
            try:
                statistics = await self._ask_reward()
                self._reward_has_restarted |= self._received.update(statistics)
            except SluiceError as error:
                logger.debug("the reward service keeps its last counters: %s", error)
                return None
            return self._received.by_use()

    async def _ask_fleet_counters(self) -> bool:
        """Ask all replicas; return whether all have answered."""
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(
                    self._ask_replica_counters(member.info), name=f"counters of {member.info.name}"
                )
                for member in self._fleet.members()
            ]
        return all(task.result() for task in calls)

    async def _ask_replica_counters(self, replica: ReplicaInfo) -> bool:
        try:
            self._fleet.note_counters(replica, await self._ask_replica(replica))
        except SluiceError as error:
            logger.debug("a replica keeps the counters of its last heartbeat: %s", error)
            return False
        self._answered.add(replica.instance_id)
        return True
