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
from collections.abc import Callable
from dataclasses import dataclass

from services.reward.batcher import Batcher
from services.reward.in_flight import InFlightTable
from services.reward.outcomes import OutcomeRecorder
from services.reward.prompt_key import prompt_key
from services.reward.prompt_memory_store import PromptMemoryStore
from services.reward.prompt_source import PromptSource
from services.reward.quarantine import Quarantine
from services.reward.replica_queue import ReplicaQueue
from services.reward.settings import PipelineSettings
from sluice.algorithm.room import groups_with_capacity
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.prompt_memory import PromptHistory
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.algorithm.sampling.visit import Attempt
from sluice.errors import SluiceError
from sluice.types import Prompt, PromptOrigin


@dataclass(frozen=True, slots=True)
class AdmissionParts:
    """What decides about a start; `memory` is ``None`` for strategies without one."""

    strategy: SamplingStrategy
    source: PromptSource
    queue: ReplicaQueue
    batcher: Batcher
    in_flight: InFlightTable
    recorder: OutcomeRecorder
    memory: PromptMemoryStore | None
    quarantine: Quarantine


class Admission:
    """Starts groups.

    Args:
        settings: sizes of groups.
        parts: what is asked.
        version: the version announced; ``None``: nothing may start.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        parts: AdmissionParts,
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
