"""Start groups: carry out the sampling strategy's decisions on which prompts start, and when.

Consumes: capacity of the fleet, and prompts (clients' first come first served, then the data set).
Waits for: the data set and the memory of prompts, both read in threads. Produces: attempts that
start, and prompts that are skipped.

A client's prompt is never skipped: the client waits for its outcome, so what earlier attempts
showed does not count. A whole epoch is not skipped either: once as many prompts in a row were
skipped as the data set has rows, the next one is treated like an unknown one. A prompt in
quarantine ends at once, whether a client or the data set brought it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.reward.generation.queue import ReplicaQueue
from services.reward.generation.request import prompt_key
from services.reward.group_table import EndCause, Group, GroupEnding, GroupTable
from services.reward.groups.batches import TrainBatches
from services.reward.groups.settings import GroupSettings
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import PromptSource
from sluice.algorithm.sampling.admission import groups_with_capacity
from sluice.algorithm.sampling.attempt import Attempt
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.errors import SluiceError
from sluice.types import Prompt, PromptEnd, PromptOrigin


class GroupAdmission:
    """Starts groups.

    Args:
        settings: sizes of groups.
        groups: all groups.
        batches: knows how many groups are in training.
        strategy: decides how many groups start, and which.
        source: of prompts.
        queue: knows the fleet's capacity.
        memory: of earlier attempts; ``None`` for strategies without one.
        quarantine: prompts that do not start.
    """

    def __init__(
        self,
        *,
        settings: GroupSettings,
        groups: GroupTable,
        batches: TrainBatches,
        strategy: SamplingStrategy,
        source: PromptSource,
        queue: ReplicaQueue,
        memory: PromptMemoryStore | None,
        quarantine: Quarantine,
    ) -> None:
        self._groups = groups
        self._batches = batches
        self._strategy = strategy
        self._source = source
        self._queue = queue
        self._memory = memory
        self._quarantine = quarantine
        # Needed at every start, so computed once.
        self._max_staleness = settings.rules.max_staleness
        self._first_sequences = settings.first_sequences(
            settings.probe_samples or settings.samples_per_group
        )
        self._epoch_rows = settings.epoch_rows
        self._num_skipped = 0  # in a row

    async def admit(self, start: Callable[[Group, Attempt], None]) -> None:
        """Start as many groups as may start, while there are prompts.

        Raises:
            BatchUnfillableError: the strategy gives up.
            DataError: the data set or the memory of prompts cannot be read.
        """
        source = self._source
        while self.num_to_start() > 0:
            prompt = await source.next_prompt(self._groups.policy_version or 0, time.monotonic())
            if prompt is None:
                return
            group = self._groups[prompt.prompt_id]
            if (reason := self._quarantine.reason(prompt)) is not None:
                ending = GroupEnding(PromptEnd.DROPPED_FAILED, reason, cause=EndCause.QUARANTINE)
                self._groups.end(group, ending)
                continue
            try:
                with source.in_hand():
                    attempt = await self._decided(prompt)
            except SluiceError:
                source.put(prompt)
                raise
            if attempt is None:  # things changed while the data set or the memory was read
                source.put(prompt)
                return
            if attempt.is_skipped:
                self._num_skipped += 1
                self._strategy.skipped(attempt)
                self._groups.end(group, GroupEnding(PromptEnd.SKIPPED, why_skipped(attempt)))
            else:
                self._num_skipped = 0
                start(group, attempt)

    def num_to_start(self) -> int:
        """Count the groups that may start now, by the strategy and the fleet's capacity."""
        version = self._groups.policy_version
        if version is None:
            return 0
        # Replicas that serve an older version than this could only add groups that are too old.
        free = self._queue.num_free_sequences(version - self._max_staleness)
        capacity = groups_with_capacity(
            free - self._groups.num_unrequested,  # those wait for a replica, or are about to
            first_sequences=self._first_sequences,
            is_idle=not self._groups.num_in_flight,
        )
        return self._strategy.num_to_start(self._batches.load(capacity))

    async def _decided(self, prompt: Prompt) -> Attempt | None:
        """Return the strategy's decision about a prompt; ``None``: no group may start any more."""
        key, history = prompt_key(prompt), None
        is_client = prompt.origin is PromptOrigin.CLIENT
        if self._memory is not None and not is_client and self._num_skipped < self._epoch_rows:
            history = await asyncio.to_thread(self._memory.read, key)
        version = self._groups.policy_version
        if version is None or not self.num_to_start():
            return None
        return self._strategy.attempt(key, prompt.sequence, history, version)


def why_skipped(attempt: Attempt) -> str:
    """Return the detail of a skipped prompt's outcome, with what earlier attempts showed."""
    thinned = attempt.side is Side.PLAIN
    why = "left out to keep the share of hard prompts" if thinned else "not worth its tokens"
    history = attempt.history
    if history is None:
        return why
    graded = history.num_right + history.num_wrong
    return f"{why}: {history.num_right:.1f} of {graded:.1f} samples right in earlier attempts"
