"""Train batches for the trainer: formed when the staleness rules allow, leased, acknowledged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.reward.batcher import Batcher
from services.reward.change_signal import ChangeSignal
from services.reward.in_flight import InFlightTable
from services.reward.ledger import PromptLedger, PromptState
from services.reward.outcomes import OutcomeRecorder
from services.reward.prompt_source import PromptSource
from services.reward.recovered_lease import RecoveredLease
from services.reward.stale_groups import StaleGroups
from services.reward.yield_guard import YieldGuard
from sluice.algorithm.admission import kept_upper_bound
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.algorithm.staleness import BatchDecision
from sluice.concurrency.deadline import deadline
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
