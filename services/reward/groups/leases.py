"""Lease train batches to the trainer: form one when the staleness rules allow, take it back,
recover it after a crash, acknowledge it.

A kept group leaves in one of two ways: in an acknowledged batch, or because it grew too stale. Only
the sampling strategy `rounds` drops what a batch did not take.

Running groups that would have no slot in any batch in time are cancelled here too. Consumes: each
group that starts and each that is kept; only these two events can leave a running group without a
slot. Produces: cancelled tasks, whose prompts wait again (a newer policy generates their samples)
or, under ``on_stale: drop`` and beyond the bound already, end as stale. Under ``on_stale: wait``
admission leaves this to bad luck alone, so it is logged and counted as ``stale``. Where an
on-policy batch is filled on average every batch preempts some groups: those are counted
as ``withdrawn``, and reserve a slot if it happens to them often (`algorithm.groups.staleness`).

The batch that was leased when the reward service died: its samples died too, but the trainer may
hold it. What the trainer does next decides. An acknowledgement, or the announcement of a later
version: it was trained. Another call for a batch, or another trainer: it was not, and its prompts
wait again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from uuid import uuid4

from services.reward.group import CancelReason, Discard, Ending, Group, Groups, GroupState
from services.reward.groups.settings import BatchRules
from services.reward.ledger.ledger import PromptLedger
from services.reward.prompts.source import PromptSource
from services.reward.records.statistics import GroupStatistics
from services.reward.records.yield_guard import YieldGuard
from sluice.algorithm.groups.staleness import BatchDecision, reserves_slot
from sluice.algorithm.sampling.admission import kept_upper_bound
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.concurrency.deadlines import deadline
from sluice.errors import DeadlineError, NotFoundError, SluiceError
from sluice.types import GradedGroup, PromptEnd, Scored, TrainBatch, TrainGroup

logger = logging.getLogger(__name__)

PEER = "reward service"
WAIT_GROUPS = "timing_s/wait_groups"
"""Seconds from the trainer's request for a batch until it was formed."""


class TrainBatches:
    """The trainer's side of the loop.

    Args:
        groups: all groups.
        ledger: holds the open lease.
        source: knows whether more prompts can come, and takes those that wait again.
        strategy: decides whether kept groups may be taken.
        statistics: of a batch.
        guard: knows whether the yield is hopeless.
        rules: batch size and staleness.
        changes: notified at every change that may complete a batch.

    Attributes:
        leased: the batch at the trainer, if this process formed it.
        error: why there are no more batches.
        reason: describes what a batch waits for.
    """

    def __init__(
        self,
        *,
        groups: Groups,
        ledger: PromptLedger,
        source: PromptSource,
        strategy: SamplingStrategy,
        statistics: GroupStatistics,
        guard: YieldGuard,
        rules: BatchRules,
        changes: ChangeSignal,
    ) -> None:
        self._groups = groups
        self._ledger = ledger
        self._source = source
        self._strategy = strategy
        self._statistics = statistics
        self._guard = guard
        self._rules = rules
        self._changes = changes
        self._carries_over = not strategy.discards_surplus
        self._preempts = strategy.rules.preempts
        self._num_asking = 0
        self._asked = (-1, 0.0)  # a step, and when its batch was first asked for
        self._was_taken_back = False
        self._unpublished: list[int] = []  # versions that leases were formed under
        self._trained_version: int | None = None  # of a recovered lease that was acknowledged
        self.leased: TrainBatch | None = None
        self.error: SluiceError | None = None
        self.reason: Callable[[], str] = str
        if ledger.open_lease is not None:  # an earlier service's: its trainer may be at it
            self._unpublished.append(ledger.open_lease.version)

    @property
    def is_asked(self) -> bool:
        """Whether the trainer waits for a batch now."""
        return self._num_asking > 0

    @property
    def num_in_training(self) -> int:
        """Groups leased under a version whose successor is not announced yet."""
        return len(self._unpublished) * self._rules.batch_size

    def load(self, capacity: int) -> LoopLoad:
        """Return the loop as the strategy sees it, where the fleet could take `capacity` groups."""
        groups = self._groups
        return LoopLoad(
            num_in_flight=groups.num_in_flight,
            num_kept=groups.num_kept,
            num_in_training=self.num_in_training,
            capacity=capacity,
            num_sure=groups.num_sure,
        )

    async def take(self, step: int, version: int, seconds: float) -> TrainBatch:
        """Lease the batch for `version`; the same again until it is acknowledged.

        Raises:
            DataExhaustedError: the data set has ended before the batch was full.
            BatchUnfillableError: none can be formed any more.
            DeadlineError: not within `seconds`; names what is waited for.
            SluiceError: what stopped the loop.
        """
        self._num_asking += 1
        if self._asked[0] != step:  # else the trainer asks again: its first call was lost
            self._asked = (step, time.monotonic())
        try:
            async with deadline(seconds, peer=PEER, phase="filling a batch"):
                return await self._next(version)
        except DeadlineError as error:
            phase = f"filling the batch of step {step}, waiting for {self.reason()}"
            raise DeadlineError(PEER, phase, seconds) from error
        finally:
            self._num_asking -= 1

    def batch(self, batch_id: str) -> TrainBatch:
        """Return the batch at the trainer.

        Raises:
            NotFoundError: it is another one, or none.
        """
        if self.leased is None or self.leased.batch_id != batch_id:
            raise NotFoundError(
                f"batch '{batch_id}' is not leased (it was taken back, or never existed); take the "
                "next batch"
            )
        return self.leased

    def acknowledge(self, batch_id: str, step: int) -> tuple[GradedGroup, ...]:
        """Close a lease: its prompts are trained. Repeating it is harmless.

        Returns:
            the batch's groups; none if it was closed before, or if another process formed it.

        Raises:
            NotFoundError: no such lease.
        """
        self._changes.notify()
        lease = self._ledger.open_lease
        if self._ledger.leased(batch_id) is None or lease is None:
            return ()
        detail = ""
        if self.leased is None:
            detail = f"rewards of batch {batch_id} were lost when the reward service restarted"
            self._trained_version = lease.version
        groups = self._groups.leased()
        self._statistics.acknowledged(len(groups))
        for group in groups:
            self._groups.end(group, Ending(PromptEnd.TRAINED, detail, step))
        self._ledger.acknowledge()
        self.leased = None
        return tuple(group.graded for group in groups if group.graded is not None)

    def fail(self, error: SluiceError) -> None:
        """Nothing can be trained any more: every call for a batch raises `error`."""
        logger.error("no more batches: %s", error)
        self.close(error)

    def close(self, reason: SluiceError) -> None:
        """Form no more batches; every call for one raises the first reason."""
        self.error = self.error or reason
        self._changes.notify()

    # -------------------------------------------------------------------- versions and trainers

    def version_to_sample(self) -> int | None:
        """Return the version that groups may start under; ``None``: none may.

        At S = 0 nothing starts while the trainer holds, or may hold, a recovered batch of that
        version: what was generated could grow stale. At S > 0 that batch counts as in training, so
        capacity is left for the next ones.
        """
        version = self._groups.policy_version
        if version is None or self.leased is not None or self._rules.max_staleness:
            return version
        if self._ledger.open_lease is not None:
            return None
        trained = self._trained_version
        return None if trained is not None and version <= trained else version

    def announcing(self, version: int) -> None:
        """A version is about to be announced: a recovered lease of an older one was trained."""
        lease = self._ledger.open_lease
        if self.leased is None and lease is not None and lease.version < version:
            self.acknowledge(lease.batch_id, lease.version + 1)

    def published(self, version: int) -> None:
        """A version was announced: groups leased under older ones no longer count."""
        self._unpublished = [leased for leased in self._unpublished if leased >= version]

    def change_trainer(self) -> list[Group]:
        """Another trainer begins: void the lease. Return the groups that were leased."""
        self._unpublished.clear()
        self._trained_version = None
        self.leased = None
        groups = self._groups.leased()
        self._ledger.release_lease()
        return groups

    # --------------------------------------------------------------------- groups without a slot

    def reserves_slot(self, group: Group) -> bool:
        """Return whether a group that starts gets a slot in the next batch for certain."""
        return self._preempts and reserves_slot(
            group.num_preemptions, self._groups.num_reserved, self._rules.batch_size
        )

    def cancel_expired(self) -> None:
        """Cancel the running groups that kept ones leave no slot for."""
        announced = self._groups.policy_version
        if announced is None or not self._carries_over:
            return
        next_version = max([announced, *(version + 1 for version in self._unpublished)])
        expired = self._groups.ages.expired(next_version)
        if expired:
            self._cancel(expired, next_version)

    def _cancel(self, expired: Collection[str], next_version: int) -> None:
        if not self._carries_over:  # kept groups do not wait: a slot is of no use to them
            return
        for prompt_id in expired:
            reason = CancelReason.NO_SLOT
            if self._preempts:  # where batches preempt, a late group is preempted, never dropped
                reason = CancelReason.PREEMPTED
            elif self._groups.ages.drops(prompt_id, next_version):
                reason = CancelReason.TOO_OLD
            self._groups[prompt_id].cancel(reason)

    # ---------------------------------------------------------------------------- forming a batch

    async def _next(self, version: int) -> TrainBatch:
        while True:
            change = self._changes.next_change()
            if self.error is not None:
                raise self.error
            batch = self._still_leased(version) or self._formed(version)
            if batch is not None:
                return batch
            await change.wait()

    def _still_leased(self, version: int) -> TrainBatch | None:
        """Return the lease, unless the trainer asks for a version that it was not checked for."""
        batch = self.leased
        if batch is None:
            self._give_back_recovered()
            return None
        if batch.policy_version == version:
            return batch
        logger.warning("batch %s taken back: version %d asks", batch.batch_id, version)
        self._was_taken_back = True
        self._not_in_training(batch.policy_version)
        self.leased = None
        self._groups.take_back_lease()
        return None

    def _give_back_recovered(self) -> None:
        """The batch of an earlier service never arrived: its prompts wait again."""
        lease = self._ledger.open_lease
        if lease is None:
            return
        logger.warning("batch %s died with the service that leased it", lease.batch_id)
        groups = self._groups.leased()
        self._ledger.release_lease()
        for group in groups:
            self._groups.requeue(group, Discard.TAKEN_OVER)
            self._source.put(group.prompt)
        self._not_in_training(lease.version)
        self._changes.notify()

    def _not_in_training(self, version: int) -> None:
        if version in self._unpublished:  # else the version was published meanwhile
            self._unpublished.remove(version)

    def _formed(self, version: int) -> TrainBatch | None:
        decision = self._groups.ages.decide(
            version, partial(kept_upper_bound, estimate=self._strategy.estimate)
        )
        chosen = [self._groups[prompt_id] for prompt_id in decision.chosen]
        self._drop_stale(decision, version)
        if chosen and self._may_form():
            self._drop_surplus(chosen)
            return self._form(chosen, version)
        self._check_fillable(decision)
        return None

    def _may_form(self) -> bool:
        """Return whether the strategy lets kept groups go.

        The last wave of the data may be too small to end: its prompts are trained on all the same,
        where they fill a batch.
        """
        is_last = self._source.is_exhausted and not self._groups.num_in_flight
        return self._was_taken_back or is_last or self._strategy.may_form(self.load(0))

    def _drop_surplus(self, chosen: Collection[Group]) -> None:
        """End what a batch does not take, where the strategy carries nothing over."""
        if self._carries_over:
            return
        detail = f"kept, and the batch was full with {self._rules.batch_size} groups"
        taken = set(chosen)
        for group in self._groups.in_state(GroupState.KEPT):
            if group not in taken:
                self._groups.end(group, Ending(PromptEnd.DROPPED_SURPLUS, detail))

    def _drop_stale(self, decision: BatchDecision, version: int) -> None:
        for prompt_id in decision.dropped:
            group = self._groups[prompt_id]
            assert group.graded is not None
            detail = f"oldest token of version {group.graded.oldest_version}, batch of {version}"
            self._groups.end(group, Ending(PromptEnd.DROPPED_STALE, detail))
        self._cancel(decision.expired, version)

    def _form(self, chosen: list[Group], version: int) -> TrainBatch:
        self._was_taken_back = False
        asked_s = self._asked[1]
        self._asked = (-1, 0.0)  # another call for this step is for another batch
        self._strategy.batch_formed()
        train_groups = tuple(_train_group(group.graded) for group in chosen if group.graded)
        positions = [group.prompt.position for group in chosen]
        progress = self._ledger.progress(at for at in positions if at is not None)
        batch_id = uuid4().hex
        self._groups.lease(batch_id, version, chosen)
        self._unpublished.append(version)
        self.leased = TrainBatch(
            batch_id,
            version,
            train_groups,
            progress,
            {
                **self._statistics.close_interval(train_groups, version),
                **self._gauges(),
                "train/groups_carried_over": float(self._groups.num_kept),
                WAIT_GROUPS: time.monotonic() - asked_s,
            },
        )
        self._changes.notify()
        return self.leased

    def _gauges(self) -> dict[str, float]:
        """Return the strategy's gauges; in synchronous mode those that repeat with the run.

        The measured yield weighs groups in the order they ended, which is a matter of timing; where
        batches on policy are filled exactly, nothing is decided by it.
        """
        gauges, rules = self._strategy.statistics(), self._strategy.rules
        if rules.max_staleness == 0 and not self._preempts:
            gauges.pop("sampling/yield")
        return gauges

    def _check_fillable(self, decision: BatchDecision) -> None:
        if not decision.num_missing:
            return
        self._guard.check_yield()
        if self._source.is_exhausted and not self._groups.num_in_flight:
            raise self._guard.exhausted(self._groups.num_kept, self._rules.batch_size)


def _train_group(graded: GradedGroup) -> TrainGroup:
    """Return the scored samples of a graded group, as the optimizer sees them."""
    pairs = [
        (rollout, outcome)
        for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True)
        if isinstance(outcome, Scored)
    ]
    return TrainGroup(
        prompt_id=graded.group.prompt.prompt_id,
        prompt_token_ids=graded.group.prompt_token_ids,
        rollouts=tuple(rollout for rollout, _ in pairs),
        scores=tuple(scored for _, scored in pairs),
        data_source=graded.group.prompt.data_source,
        baseline_reward=graded.baseline_reward,
        images=graded.group.prompt.images,
    )


class ChangeSignal:
    """Take `next_change` before looking at the state, then wait for it: no change is missed.

    Args:
        then: notified as well, after this one.
    """

    def __init__(self, then: ChangeSignal | None = None) -> None:
        self._event = asyncio.Event()
        self._then = then

    def next_change(self) -> asyncio.Event:
        """Return an event that is set at the first `notify` from now on."""
        return self._event

    def notify(self) -> None:
        """Wake all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()
        if self._then is not None:
            self._then.notify()
