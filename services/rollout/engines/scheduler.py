"""Which waiting samples get the free slots, and what has to be prefilled for them.

By priority, then first come, first served. A group's samples share one prefill; if slots run out in
the middle of a group, its prefilled prompt is kept for the samples that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from services.rollout.engines.decoder import PrefilledPrompts, TokenRow
from services.rollout.engines.row_table import RunningSample
from sluice.vision.image_prompts import ImagePrompt

__all__ = ["Admission", "GroupQueue", "WaitingGroup", "prefill_batches"]

_REFILL_SHARE = 16


@dataclass(slots=True, eq=False)
class WaitingGroup:
    """Samples that continue the same tokens.

    Attributes:
        tokens: prompt, and what was drawn before of a sample that is continued.
        samples: those still waiting.
        prefilled: where the state of ``tokens[:-1]`` is, once it was computed.
        priority: groups of higher priority go first.
        images: the prompt's.
    """

    tokens: TokenRow
    samples: deque[RunningSample]
    prefilled: tuple[PrefilledPrompts, int] | None = None
    priority: int = 0
    images: ImagePrompt | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """Samples of one group that enter now."""

    group: WaitingGroup
    samples: tuple[RunningSample, ...]


@dataclass(slots=True, eq=False)
class GroupQueue:
    """Waiting groups by priority, then in order of arrival."""

    slots: int
    _groups: deque[WaitingGroup] = field(default_factory=deque)
    waiting: int = 0

    def append(self, group: WaitingGroup) -> None:
        """Takes a group with at least one sample."""
        place = len(self._groups)
        while place and self._groups[place - 1].priority < group.priority:
            place -= 1
        self._groups.insert(place, group)
        self.waiting += len(group.samples)

    def admit(self, free: int) -> list[Admission]:
        """The samples that enter `free` slots.

        While others run, slots are refilled a sixteenth of all at a time: a prefill of one group
        costs about as much as one of several.
        """
        if free < min(self.waiting, max(1, self.slots // _REFILL_SHARE)):
            return []
        admissions = []
        while free > 0 and self._groups:
            group = self._groups[0]
            count = min(free, len(group.samples))
            admissions.append(
                Admission(group, tuple(group.samples.popleft() for _ in range(count)))
            )
            free -= count
            self.waiting -= count
            if not group.samples:
                self._groups.popleft()
        return admissions

    def remove(self, unwanted: Callable[[RunningSample], bool]) -> list[RunningSample]:
        """Takes the samples that fulfil `unwanted` out of the queue."""
        removed: list[RunningSample] = []
        for group in self._groups:
            removed.extend(sample for sample in group.samples if unwanted(sample))
            group.samples = deque(sample for sample in group.samples if not unwanted(sample))
        self._groups = deque(group for group in self._groups if group.samples)
        self.waiting -= len(removed)
        return removed

    def forget_prefilled(self) -> None:
        """Waiting groups are prefilled again: the weights have changed."""
        for group in self._groups:
            group.prefilled = None


def prefill_batches(lengths: list[int], token_budget: int) -> Iterator[list[int]]:
    """Indexes of prompts to prefill together: of similar length, padded to at most the budget.

    A budget of 0 puts each prompt in a batch of its own.
    """
    order = np.argsort(lengths, kind="stable")
    batch: list[int] = []
    for index in order.tolist():
        if batch and (len(batch) + 1) * lengths[index] > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
