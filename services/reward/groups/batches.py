"""Lease train batches to the trainer: form one when the staleness rules allow it, void its lease,
recover the lease after a crash, acknowledge it.

A kept group ends in an acknowledged batch or is dropped as too old. Only the sampling strategy
`rounds` also drops the groups that a batch did not take. When another trainer takes over, the group
loop starts kept prompts again.

This module also cancels running groups that no batch has a slot for in time. A group can lose its
slot only when another group starts or is kept, so these two events trigger the check. The prompt of
a cancelled group starts again under a newer policy; with ``on_stale: drop`` it ends as stale if it
exceeds the bound already. With ``on_stale: wait`` admission makes this rare, so each case is logged
and counted as ``stale``. If an on-policy batch is filled on average, every batch preempts some
groups: these count as ``preempted``, and a prompt that is preempted often reserves a slot
(`algorithm.groups.staleness`).

When the reward service dies, the samples of the leased batch die too, but the trainer may hold the
batch. The trainer's next call decides. If it acknowledges the batch, or announces a later version,
the batch was trained. If it takes another batch, or another trainer announces itself, the batch was
not trained, and its prompts start again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from uuid import uuid4

from services.reward.group_table import CancelReason, Group, GroupEnding, GroupState, GroupTable
from services.reward.groups.sources import TrainingSource, TrainingSources, interleave
from services.reward.ledger.ledger import not_leased
from services.reward.records.statistics import GroupStatistics
from sluice.algorithm.groups.staleness import BatchDecision, GroupAges
from sluice.algorithm.sampling.admission import kept_upper_bound
from sluice.algorithm.sources import source_metric
from sluice.concurrency.waits import ChangeSignal, deadline
from sluice.errors import BatchUnfillableError, DeadlineError, SluiceError
from sluice.telemetry.metric_names import WAIT_GROUPS_S
from sluice.types import GradedGroup, PromptEnd, Scored, TrainBatch, TrainGroup

logger = logging.getLogger(__name__)

PEER = "reward service"


class TrainBatches:
    """The trainer's side of the loop.

    Only the ledger knows which batch is leased; this class holds the batch, if this process formed
    it, until it is acknowledged or voided.

    Attributes:
        changes: notified of every change that may complete a batch.
        num_asking: trainer calls that wait for a batch.
        error: why no more batches are formed.
        reason: describes the cause of the wait; set by the loop.
    """

    def __init__(
        self,
        *,
        groups: GroupTable,
        sources: TrainingSources,
        statistics: GroupStatistics,
        changes: ChangeSignal,
    ) -> None:
        self._groups = groups
        self._ledger = groups.ledger
        self._sources = sources
        self._statistics = statistics
        self.changes = changes
        # All sources have the same strategy, with different numbers.
        strategy = next(iter(sources.values())).strategy
        self._carries_over = not strategy.discards_surplus
        self._preempts = strategy.preempts
        self.num_asking = 0
        self._first_request = (-1, 0.0)  # a step, and the time when its batch was first requested
        self._was_voided = False
        self._batch: TrainBatch | None = None
        self.error: SluiceError | None = None
        self.reason: Callable[[], str] = str

    @property
    def num_batches_in_training(self) -> int:
        """Leased batches whose resulting version is not announced yet."""
        return max(0, self._next_version() - (self._groups.policy_version or 0))

    async def take(self, step: int, version: int, seconds: float) -> TrainBatch:
        """Lease the batch for `version`; return the same batch until it is acknowledged.

        Raises:
            DataExhaustedError: the data set has ended before the batch was full.
            BatchUnfillableError: no batch can be formed any more.
            DeadlineError: not within `seconds`; names the cause of the wait.
            SluiceError: what stopped the loop.
        """
        self.num_asking += 1
        if self._first_request[0] != step:  # otherwise the trainer repeats a lost call
            self._first_request = (step, time.monotonic())
        try:
            async with deadline(seconds, peer=PEER, phase="filling a batch"):
                while True:
                    change = self.changes.next_change
                    if self.error is not None:
                        raise self.error
                    batch = self._repeat_lease(version) or self._form(version)
                    if batch is not None:
                        return batch
                    await change.wait()
        except DeadlineError as error:
            phase = f"filling the batch of step {step}, waiting for {self.reason()}"
            raise DeadlineError(PEER, phase, seconds) from error
        finally:
            self.num_asking -= 1

    def batch(self, batch_id: str) -> TrainBatch:
        """Return the leased batch.

        Raises:
            NotFoundError: another batch is leased, or none.
        """
        if self._batch is None or self._batch.batch_id != batch_id:
            raise not_leased(batch_id)
        return self._batch

    def acknowledge(self, batch_id: str, step: int) -> tuple[GradedGroup, ...]:
        """Close a lease: its prompts are trained. Repeating the call is harmless.

        Returns:
            the batch's groups; none if it was closed before, or if another process formed it.

        Raises:
            NotFoundError: no such lease.
        """
        self.changes.notify()
        if not self._ledger.is_leased(batch_id):
            return ()
        detail = ""
        if self._batch is None:
            detail = f"rewards of batch {batch_id} were lost when the reward service restarted"
        groups = self._groups.leased()
        self._statistics.note_acknowledged(len(groups))
        for group in groups:
            self._groups.end(group, GroupEnding(PromptEnd.TRAINED, detail, step))
        self._ledger.acknowledge()
        self._batch = None
        return tuple(group.graded for group in groups if group.graded is not None)

    def fail(self, error: SluiceError) -> None:
        """Form no more batches, since nothing can be trained any more; every call raises
        `error`."""
        logger.error("no more batches: %s", error)
        self.close(error)

    def close(self, reason: SluiceError) -> None:
        """Form no more batches; every call for one raises the first reason."""
        self.error = self.error or reason
        self.changes.notify()

    def begin_again(self) -> None:
        """Form batches again, if the policy that was rolled back could fill none."""
        for source in self._sources.values():
            source.guard.begin_again()
        if isinstance(self.error, BatchUnfillableError):
            self.error = None

    def settle_recovered(self, version: int) -> None:
        """Acknowledge a recovered lease for a version before the announced one: it was trained."""
        lease = self._ledger.open_lease
        if self._batch is None and lease is not None and lease.version < version:
            self.acknowledge(lease.batch_id, lease.version + 1)

    def void_lease(self) -> list[Group]:
        """Take the leased groups back; return those that the caller must requeue or end
        (`GroupTable.void_lease`)."""
        self._batch = None
        return self._groups.void_lease()

    def cancel_without_slot(self) -> None:
        """Cancel the running groups that no batch has a slot for in time."""
        announced = self._groups.policy_version
        if announced is not None:
            next_version = max(announced, self._next_version())
            for source in self._sources.values():
                ages = source.groups.ages
                self._cancel(ages, ages.without_slot(next_version), next_version)

    def _cancel(self, ages: GroupAges, without_slot: Collection[str], next_version: int) -> None:
        if not self._carries_over:  # no kept group waits for a later batch, so none needs a slot
            return
        for prompt_id in without_slot:
            reason = CancelReason.NO_SLOT
            if self._preempts:  # if batches preempt, a late group is preempted, never dropped
                reason = CancelReason.PREEMPTED
            elif ages.drops(prompt_id, next_version):
                reason = CancelReason.TOO_OLD
            self._groups[prompt_id].cancel(reason)

    def _next_version(self) -> int:
        """Return the newest lease's version plus one; 0 without a lease.

        A version is the number of train batches before it, so the batches in training are those
        from the announced version up to here.
        """
        newest = self._ledger.newest_leased_version
        return 0 if newest is None else newest + 1

    def _repeat_lease(self, version: int) -> TrainBatch | None:
        """Return the leased batch if this service formed it for `version`; void any other."""
        lease = self._ledger.open_lease
        if lease is None:
            return None
        if self._batch is None:
            logger.warning("batch %s died with the service that leased it", lease.batch_id)
        elif lease.version == version:
            return self._batch
        else:
            logger.warning(
                "batch %s voided: the trainer asks for the batch of version %d",
                lease.batch_id,
                version,
            )
            self._was_voided = True
        if groups := self.void_lease():
            for group in groups:
                self._groups.requeue(group, CancelReason.TAKEN_OVER)
                self._sources[group.prompt.source].prompts.put(group.prompt)
            self.changes.notify()
        return None

    def _form(self, version: int) -> TrainBatch | None:
        """Form the batch for `version` if the rules of every source allow it; end what they drop.

        A source that lacks groups makes the others wait; otherwise they would get its share.
        """
        chosen: list[tuple[str, ...]] = []
        lacking: list[TrainingSource] = []
        for source in self._sources.values():
            decision = self._decide(source, version)
            # The last wave may have too few prompts to count as complete. Its groups are trained
            # anyway if they fill a batch.
            is_free = self._was_voided or source.is_drained
            num_in_flight = source.groups.num_in_flight
            if decision.chosen and (is_free or source.strategy.may_form(num_in_flight)):
                chosen.append(decision.chosen)
            elif decision.num_missing:
                lacking.append(source)
        if len(chosen) == len(self._sources):
            return self._lease(
                [self._groups[prompt_id] for prompt_id in interleave(chosen)], version
            )
        for source in lacking:
            source.guard.check_yield()
            if source.is_drained:
                raise source.guard.exhausted_error(source.groups.num_kept, source.num_groups)
        return None

    def _decide(self, source: TrainingSource, version: int) -> BatchDecision:
        """Return the groups of a source that the batch takes; end or cancel those without a
        slot."""
        groups, ages = self._groups, source.groups.ages
        decision = ages.decide(
            version, partial(kept_upper_bound, estimate=source.strategy.estimate)
        )
        for prompt_id in decision.dropped:
            group = groups[prompt_id]
            assert group.graded is not None
            detail = f"oldest token of version {group.graded.oldest_version}, batch of {version}"
            groups.end(group, GroupEnding(PromptEnd.DROPPED_STALE, detail))
        self._cancel(ages, decision.without_slot, version)
        return decision

    def _lease(self, chosen: list[Group], version: int) -> TrainBatch:
        """Lease the chosen groups; end the other ones if the strategy carries none over."""
        if not self._carries_over:
            detail = f"kept, and the batch was full with {self._sources.batch_size} groups"
            chosen_groups = set(chosen)
            for group in self._groups.in_state(GroupState.KEPT):
                if group not in chosen_groups:
                    self._groups.end(group, GroupEnding(PromptEnd.DROPPED_SURPLUS, detail))
        batch_id = uuid4().hex
        train_groups = tuple(_train_group(group.graded) for group in chosen if group.graded)
        # The trainer saves this progress with the weights that the batch makes, so the batch's own
        # rows count as ended although they are only leased.
        progress = self._ledger.progress([group.prompt for group in chosen])
        self._groups.lease(batch_id, version, chosen)
        gauges = self._gauges()
        self._batch = TrainBatch(
            batch_id,
            version,
            train_groups,
            progress,
            {
                **self._statistics.close_interval(train_groups, version),
                **gauges,
                "train/groups_carried_over": float(self._groups.num_kept),
                WAIT_GROUPS_S: time.monotonic() - self._first_request[1],
            },
        )
        self._was_voided = False
        self._first_request = (-1, 0.0)  # another call for this step is for another batch
        self._sources.share_out()
        self.changes.notify()
        return self._batch

    def _gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {}
        for source in self._sources.values():
            source.strategy.batch_formed()
            gauges |= source.statistics()
            if source.strategy.rules.max_staleness == 0 and not self._preempts:
                # This estimate depends on the order in which groups end, so on timing. Exact
                # filling does not use it; without it the metrics of such a run repeat.
                del gauges[source_metric(source.name, "sampling/yield")]
        return gauges


def _train_group(graded: GradedGroup) -> TrainGroup:
    """Return the scored samples of a graded group, as the optimizer sees them."""
    group, outcomes = graded.group, graded.outcomes
    return TrainGroup(
        prompt_id=group.prompt.prompt_id,
        prompt_token_ids=group.prompt_token_ids,
        rollouts=tuple(
            rollout
            for rollout, outcome in zip(group.rollouts, outcomes, strict=True)
            if isinstance(outcome, Scored)
        ),
        scores=graded.scored,
        data_source=group.prompt.data_source,
        baseline_reward=graded.baseline_reward,
        images=group.prompt.images,
        source=group.prompt.source,
    )
