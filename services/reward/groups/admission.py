"""Which prompts start, and when: the sampling strategy's word, put to work.

Consumes: room on the fleet, and prompts (clients' first come first served, then the data set).
Waits for: the data set and the memory of prompts, both read in threads. Produces: visits that
start, and prompts that are passed by.

A client's prompt is never passed by: the client waits for its outcome, so what is remembered of its
words does not count. Neither is a whole epoch: once as many prompts in a row were passed by as the
data set has rows, the next one is drawn like an unknown one, whatever its earlier visits showed.
A prompt in quarantine ends at once, whoever brought it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.reward.generation.queue import ReplicaQueue
from services.reward.generation.request import prompt_key
from services.reward.groups.batcher import Batcher
from services.reward.groups.group import CancelReason, InFlightItem, InFlightTable
from services.reward.groups.settings import PipelineSettings
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import PromptSource
from services.reward.records.outcomes import OutcomeRecorder
from services.reward.records.statistics import Discard
from sluice.algorithm.groups.staleness import Preemptions
from sluice.algorithm.sampling.admission import groups_with_capacity
from sluice.algorithm.sampling.attempt import Attempt, PromptHistory
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.errors import SluiceError
from sluice.types import Prompt, PromptOrigin


@dataclass(frozen=True, slots=True)
class GroupAdmissionParts:
    """What decides about a start; `memory` is ``None`` for strategies without one."""

    strategy: SamplingStrategy
    source: PromptSource
    queue: ReplicaQueue
    batcher: Batcher
    in_flight: InFlightTable
    recorder: OutcomeRecorder
    memory: PromptMemoryStore | None
    quarantine: Quarantine


class GroupAdmission:
    """Starts groups.

    Args:
        settings: sizes of groups.
        parts: what is asked.
        version: the version announced; ``None``: nothing may start.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        parts: GroupAdmissionParts,
        version: Callable[[], int | None],
    ) -> None:
        self._settings, self._parts, self._version = settings, parts, version
        # Asked at every start, so not computed anew.
        self._max_staleness = settings.rules.max_staleness
        self._first_sequences = settings.first_sequences
        self._num_skipped = 0  # in a row

    def load(self, version: int) -> LoopLoad:
        """The loop as the strategy sees it."""
        batcher, in_flight = self._parts.batcher, self._parts.in_flight
        return LoopLoad(
            len(in_flight),
            batcher.num_kept,
            batcher.num_in_training,
            self._capacity(version),
            in_flight.num_sure,
        )

    async def admit(self, start: Callable[[Prompt, Attempt], None]) -> bool:
        """Start as many groups as may; whether it ended for want of prompts.

        Raises:
            BatchUnfillableError: the strategy gives up.
            DataError: the data set or the memory of prompts cannot be read.
        """
        source = self._parts.source
        while self._num_to_start() > 0:
            prompt = await source.next_prompt(self._version() or 0, time.monotonic())
            if prompt is None:
                return True
            if (reason := self._parts.quarantine.reason(prompt)) is not None:
                self._parts.recorder.quarantined(prompt, reason)
                continue
            try:
                with source.in_hand():
                    attempt = await self._decided(prompt)
            except SluiceError:
                source.put(prompt)
                raise
            if attempt is None:  # things changed while the data set or the memory was read
                source.put(prompt)
                return False
            if attempt.is_skipped:
                self._skip(prompt, attempt)
            else:
                self._num_skipped = 0
                start(prompt, attempt)
        return False

    def _num_to_start(self) -> int:
        version = self._version()
        return 0 if version is None else self._parts.strategy.num_to_start(self.load(version))

    def _capacity(self, version: int) -> int:
        """Groups the fleet has room for, beyond those that wait for it or are about to."""
        in_flight = self._parts.in_flight
        lowest = version - self._max_staleness
        free = self._parts.queue.num_free_sequences(lowest) - in_flight.num_unrequested
        return groups_with_capacity(
            free, first_sequences=self._first_sequences, is_idle=not len(in_flight)
        )

    async def _decided(self, prompt: Prompt) -> Attempt | None:
        """What becomes of a prompt; ``None``: it may not start any more."""
        key = prompt_key(prompt)
        history = await self._history(prompt, key)
        version = self._version()
        if version is None or not self._num_to_start():
            return None
        return self._parts.strategy.attempt(key, prompt.sequence, history, version)

    async def _history(self, prompt: Prompt, key: str) -> PromptHistory | None:
        memory = self._parts.memory
        if memory is None or prompt.origin is PromptOrigin.CLIENT:
            return None
        if self._num_skipped >= self._settings.epoch_rows:
            return None
        return await asyncio.to_thread(memory.read, key)

    def _skip(self, prompt: Prompt, attempt: Attempt) -> None:
        self._num_skipped += 1
        self._parts.strategy.skipped(attempt)
        self._parts.recorder.skipped(prompt, why_passed_by(attempt))


def why_passed_by(attempt: Attempt) -> str:
    """What the outcome of a prompt says that is passed by, with what earlier visits showed."""
    thinned = attempt.side is Side.PLAIN
    why = "left out to keep the share of hard prompts" if thinned else "not worth its tokens"
    history = attempt.history
    if history is None:
        return why
    graded = history.num_right + history.num_wrong
    return f"{why}: {history.num_right:.1f} of {graded:.1f} samples right in earlier visits"


# Running groups that would have no place in a batch in time: found at once, and started again.
#
# Consumes: each group that starts and each that is kept; these two events alone can leave a
# running group without a place. Produces: cancelled tasks, whose prompts wait again (a newer
# policy draws their samples anew) or, under ``on_stale: drop`` and beyond the bound already, end
# as stale. Under ``on_stale: wait`` admission leaves this to bad luck alone, and the tokens are
# told in the log and counted as ``stale``. Where an on-policy batch is filled on average every
# batch withdraws some groups: those are counted as ``withdrawn``, and claim a place if it
# happens to them too often (`sluice.algorithm.groups.staleness`).


class StaleGroups:
    """What becomes of running groups that kept ones leave no place for.

    Args:
        batcher: the kept groups and the rules.
        in_flight: the running ones; from here on their ages are entered beside the kept ones'.
        rules: of the sampling strategy. Where kept groups do not wait for later batches, a place is
            of no use: running groups end, and what a batch does not take is thrown away.
    """

    def __init__(self, batcher: Batcher, in_flight: InFlightTable, rules: SamplingRules) -> None:
        self._batcher, self._in_flight = batcher, in_flight
        self._carries_over = rules.strategy is not StrategyName.ROUNDS
        self._preemptions = Preemptions(rules.train_batch_size) if rules.preempts else None
        self._restarting: set[str] = set()

    def reserves_slot(self, prompt_id: str) -> bool:
        """A group starts; whether it has a place for certain from here on."""
        return self._preemptions is not None and self._preemptions.reserves_slot(prompt_id)

    def forget(self) -> None:
        """Another trainer begins: whatever was withdrawn was so from another run's batches."""
        if self._preemptions is not None:
            self._preemptions.forget()

    def check(self, announced: int | None, *, but_for: str | None = None) -> None:
        """Cancel the groups without a place.

        Args:
            announced: the version announced; ``None``: nothing is decided meanwhile.
            but_for: a prompt that has left the running groups, though its task is at work still.
        """
        if announced is None or not self._carries_over:
            return
        next_version = self._batcher.next_version(announced)
        expired = self._batcher.ages.expired(next_version)
        if not expired:
            return
        self.cancel([prompt_id for prompt_id in expired if prompt_id != but_for], next_version)

    def cancel(self, expired: Collection[str], next_version: int) -> None:
        """Cancel these groups; their fate is settled by the version of the next batch."""
        if not self._carries_over:
            return
        for prompt_id in expired:
            # Where batches withdraw, a group that starts late is withdrawn, too, and never dropped.
            if self._preemptions is None and self._batcher.ages.drops(prompt_id, next_version):
                self._in_flight.cancel(prompt_id, CancelReason.STALE)
            else:
                self._restarting.add(prompt_id)
                self._in_flight.cancel(prompt_id, CancelReason.REQUEUED)

    def left(self, item: InFlightItem, *, is_cancelled: bool) -> Discard | None:
        """Forget a group whose task has ended; why it starts again, if it was cancelled here to.

        Args:
            item: the group.
            is_cancelled: whether its task was; one that had just ended was not any more.
        """
        prompt_id = item.prompt.prompt_id
        was_restarting = is_cancelled and prompt_id in self._restarting
        self._restarting.discard(prompt_id)
        if self._preemptions is None:
            return Discard.STALE if was_restarting else None
        if not was_restarting:
            self._preemptions.ended(prompt_id)
            return None
        self._preemptions.preempted(prompt_id)
        return Discard.PREEMPTED
