"""Lease train batches to the trainer: form one when the staleness rules allow, recover it after
a crash, acknowledge it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.reward.groups.admission import StaleGroups
from services.reward.groups.batcher import Batcher
from services.reward.groups.group import InFlightTable
from services.reward.ledger.ledger import PromptLedger, PromptState
from services.reward.prompts.source import PromptSource
from services.reward.records.outcomes import OutcomeRecorder
from services.reward.records.statistics import Discard, YieldGuard
from sluice.algorithm.groups.staleness import BatchDecision
from sluice.algorithm.sampling.admission import kept_upper_bound
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.concurrency.deadlines import deadline
from sluice.errors import DeadlineError, SluiceError
from sluice.types import GradedGroup, PromptEnd, TrainBatch

logger = logging.getLogger(__name__)

PEER = "reward service"
WAIT_GROUPS = "timing_s/wait_groups"
"""Seconds from the trainer's asking for a batch until it was formed."""


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What decides about a batch.

    `source` tells whether more prompts can come, `guard` whether the yield is hopeless, `strategy`
    whether kept groups may be taken at a `load`, `reason` what is waited for; `changes` is notified
    at every change that may complete a batch.
    """

    batcher: Batcher
    recorder: OutcomeRecorder
    ledger: PromptLedger
    in_flight: InFlightTable
    stale_groups: StaleGroups
    source: PromptSource
    guard: YieldGuard
    strategy: SamplingStrategy
    load: Callable[[int], LoopLoad]
    changes: ChangeSignal
    reason: Callable[[], str]


class TrainBatches:
    """The trainer's side of the loop."""

    def __init__(self, parts: BatchParts, batch_size: int) -> None:
        self._batcher, self._recorder, self._ledger = parts.batcher, parts.recorder, parts.ledger
        self._in_flight, self._source, self._guard = parts.in_flight, parts.source, parts.guard
        self._stale_groups, self._strategy = parts.stale_groups, parts.strategy
        self._load, self._was_taken_back = parts.load, False
        self._changes, self._reason = parts.changes, parts.reason
        self._batch_size = batch_size
        self._num_asking = 0
        self._asked = (-1, 0.0)  # a step, and when its batch was first asked for
        self.recovered = RecoveredLease(parts.ledger, parts.recorder, parts.source)
        self.error: SluiceError | None = None

    @property
    def is_asked(self) -> bool:
        """Whether the trainer waits for a batch now."""
        return self._num_asking > 0

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
            phase = f"filling the batch of step {step}, waiting for {self._reason()}"
            raise DeadlineError(PEER, phase, seconds) from error
        finally:
            self._num_asking -= 1

    def acknowledge(self, batch_id: str, step: int) -> tuple[GradedGroup, ...]:
        """Close a lease: its prompts are trained. Repeating it is harmless.

        Returns:
            the batch's groups, none if it was closed before.

        Raises:
            NotFoundError: no such lease.
        """
        if self._batcher.lease is None:
            self.recovered.trained(batch_id, step)
        lease = self._batcher.acknowledge(batch_id) if self._batcher.lease else None
        if lease is None:
            self._changes.notify()
            return ()
        self._recorder.acknowledged(len(lease.groups))
        for graded in lease.groups:
            self._recorder.ended(graded.group.prompt, PromptEnd.TRAINED, graded=graded, step=step)
        self._ledger.acknowledge()
        self._changes.notify()
        return lease.groups

    def fail(self, error: SluiceError) -> None:
        """Nothing can be trained any more; whoever takes a batch is told why."""
        logger.error("no more batches: %s", error)
        self.close(error)

    def close(self, reason: SluiceError) -> None:
        """No more batches; who takes one is told the (first) reason."""
        self.error = self.error or reason
        self._changes.notify()

    async def _next(self, version: int) -> TrainBatch:
        while True:
            change = self._changes.next_change()
            if self.error is not None:
                raise self.error
            batch = self._leased(version) or self._formed(version)
            if batch is not None:
                return batch
            await change.wait()

    def _leased(self, version: int) -> TrainBatch | None:
        """The lease, unless the trainer has gone on to a version the batch was not checked for."""
        lease = self._batcher.lease
        if lease is None:
            if (lost := self._ledger.open_lease) is not None:
                self.recovered.give_back()
                self._batcher.not_in_training(lost.version)
                self._changes.notify()
            return None
        if lease.batch.policy_version == version:
            return lease.batch
        logger.warning("batch %s taken back: version %d asks", lease.batch.batch_id, version)
        self._was_taken_back = True
        self._ledger.release_lease()
        for graded in self._batcher.take_back_lease():
            self._ledger.move(graded.group.prompt.prompt_id, PromptState.KEPT)
        return None

    def _formed(self, version: int) -> TrainBatch | None:
        decision = self._batcher.ages.decide(
            version, partial(kept_upper_bound, estimate=self._strategy.estimate)
        )
        chosen = self._batcher.kept_groups(decision.chosen)
        self._drop_stale(decision, version)
        if chosen and self._may_form(version):
            self._drop_surplus(chosen)
            return self._form(chosen, version)
        self._check_fillable(decision)
        return None

    def _may_form(self, version: int) -> bool:
        """Whether the strategy lets kept groups go. The last wave of the data may be too small to
        end by itself: its prompts are trained on all the same, where they fill a batch."""
        is_last = self._source.is_exhausted and not len(self._in_flight)
        return self._was_taken_back or is_last or self._strategy.may_form(self._load(version))

    def _drop_surplus(self, chosen: tuple[GradedGroup, ...]) -> None:
        """End what a batch does not take, where the strategy carries nothing over."""
        if not self._strategy.discards_surplus:
            return
        taken = {graded.group.prompt.prompt_id for graded in chosen}
        for graded in self._batcher.all_kept():
            prompt = graded.group.prompt
            if prompt.prompt_id not in taken:
                self._batcher.remove(prompt.prompt_id)
                detail = f"kept, and the batch was full with {self._batch_size} groups"
                end = PromptEnd.DROPPED_SURPLUS
                self._recorder.surplus_discarded()
                self._recorder.ended(prompt, end, graded=graded, detail=detail)

    def _drop_stale(self, decision: BatchDecision, version: int) -> None:
        for graded in self._batcher.kept_groups(decision.dropped):
            self._batcher.remove(graded.group.prompt.prompt_id)
            self._recorder.surplus_discarded()
            detail = f"oldest token of version {graded.oldest_version}, batch of {version}"
            self._recorder.ended(
                graded.group.prompt, PromptEnd.DROPPED_STALE, graded=graded, detail=detail
            )
        self._stale_groups.cancel(decision.expired, version)

    def _form(self, chosen: tuple[GradedGroup, ...], version: int) -> TrainBatch:
        prompts = [graded.group.prompt for graded in chosen]
        self._was_taken_back = False
        asked_s = self._asked[1]
        self._asked = (-1, 0.0)  # who asks for this step once more does so for another batch
        self._strategy.batch_formed()
        batch = self._batcher.form(
            chosen,
            version=version,
            progress=self._ledger.progress(p.position for p in prompts if p.position is not None),
            statistics=lambda groups: {
                **self._recorder.close_interval(groups, version),
                WAIT_GROUPS: time.monotonic() - asked_s,
            },
        )
        self._ledger.lease(batch.batch_id, version, [prompt.prompt_id for prompt in prompts])
        self._changes.notify()
        return batch

    def _check_fillable(self, decision: BatchDecision) -> None:
        if not decision.num_missing:
            return
        self._guard.check_yield()
        if self._source.is_exhausted and not len(self._in_flight):
            raise self._guard.exhausted(self._batcher.num_kept, self._batch_size)


# The batch that was leased when the reward service died.
#
# Its samples died with the service, but the trainer may hold it. What the trainer does next
# tells: an acknowledgement, or the announcement of a later version: it was trained. Another call
# for a batch, or another trainer: it was not, and its prompts wait again.


class RecoveredLease:
    """What becomes of it; its callers make sure that the service holds no lease itself.

    Args:
        ledger: knows which prompts were leased.
        recorder: ends or restarts them.
        source: issues them again.
    """

    def __init__(
        self, ledger: PromptLedger, recorder: OutcomeRecorder, source: PromptSource
    ) -> None:
        self._ledger, self._recorder, self._source = ledger, recorder, source
        self._trained_version: int | None = None  # that the batch was leased under

    def holds_back(self, version: int) -> bool:
        """Whether groups of `version` may not start: the trainer holds the batch of that version,
        or may hold it, and what was drawn under it could grow stale."""
        if self._ledger.open_lease is not None:
            return True
        return self._trained_version is not None and version <= self._trained_version

    def forget(self) -> None:
        """Another trainer begins, perhaps from an older version."""
        self._trained_version = None

    def trained(self, batch_id: str, step: int) -> None:
        """It was trained; harmless if that was known.

        Raises:
            NotFoundError: no such lease.
        """
        prompts = self._ledger.leased(batch_id)
        if prompts is None:
            return
        detail = f"rewards of batch {batch_id} were lost when the reward service started anew"
        for prompt in prompts:
            self._recorder.ended(prompt, PromptEnd.TRAINED, step=step, detail=detail)
        lease = self._ledger.open_lease
        self._trained_version = lease.version if lease else None
        self._recorder.acknowledged(len(prompts))
        self._ledger.acknowledge()

    def announced(self, version: int) -> None:
        """A trainer that has gone beyond its version has trained it."""
        lease = self._ledger.open_lease
        if lease is not None and lease.version < version:
            self.trained(lease.batch_id, lease.version + 1)

    def give_back(self) -> None:
        """It never arrived: its prompts wait again."""
        lease = self._ledger.open_lease
        if lease is None:
            return
        logger.warning("batch %s died with the service that leased it", lease.batch_id)
        for prompt in self._ledger.release_lease():
            self._recorder.restarted(prompt, Discard.TAKEN_OVER)
            self._source.put(prompt)


class ChangeSignal:
    """Take `next_change` before looking at the state, then wait for it: no change is missed.

    Args:
        then: notified as well, after this one.
    """

    def __init__(self, then: ChangeSignal | None = None) -> None:
        self._event = asyncio.Event()
        self._then = then

    def next_change(self) -> asyncio.Event:
        """Set at the first `notify` from now on."""
        return self._event

    def notify(self) -> None:
        """Wake all waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()
        if self._then is not None:
            self._then.notify()
