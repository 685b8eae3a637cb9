"""One group in progress: its state, its age and its task; and the table of all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.algorithm.groups.staleness import GroupAges
from sluice.algorithm.sampling.attempt import Attempt
from sluice.types import Prompt


class CancelReason(StrEnum):
    """What becomes of a prompt whose task is cancelled."""

    REQUEUED = "requeued"
    STALE = "stale"


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One group under way.

    `num_ungraded` is how many samples it has asked for whose outcomes are not counted yet;
    `drawn_as` is what was decided when its prompt was drawn, `visit` the same after its probes;
    `num_unasked` is how many sequences it will ask the fleet's room for and has not yet;
    `is_sure` if it counts as kept: once its samples differ, or from its start, if it `has_claim` to
    a place in the batch; `on_age` is told of every change of its start version.
    """

    prompt: Prompt
    admitted_as: Attempt
    attempt: Attempt
    num_unrequested: int
    on_age: Callable[[InFlightItem], None]
    task: asyncio.Task[None] | None = None
    is_grading: bool = False
    has_reservation: bool = False
    is_sure: bool = False
    num_requests: int = 0
    num_ungraded: int = 0
    cancel_reason: CancelReason = CancelReason.REQUEUED
    is_cancelled: bool = False
    began_s: float = field(default_factory=time.monotonic)
    _start_version: int | None = field(default=None, init=False)

    @property
    def start_version(self) -> int | None:
        """Version of its oldest token; ``None`` while it holds none and is about to draw none."""
        return self._start_version

    @start_version.setter
    def start_version(self, version: int | None) -> None:
        self._start_version = version
        self.on_age(self)

    def check_cancelled(self) -> None:
        """Before a judgement: a task meets its cancellation at its next pause, and may have none
        left. Then its prompt would be judged, and start again as well.

        Raises:
            CancelledError: the task was cancelled.
        """
        if self.is_cancelled:  # `Task.cancelling` counts cancellations by inner groups, too
            raise asyncio.CancelledError

    def cancel(self, cancel_reason: CancelReason) -> None:
        """End the task, once; the prompt meets `fate`."""
        if not self.is_cancelled and self.task is not None:
            self.cancel_reason, self.is_cancelled = cancel_reason, True
            self.task.cancel()


class InFlightTable:
    """All groups under way by prompt id.

    Args:
        ages: groups are entered there as they start, and taken out as they end.
    """

    def __init__(self, ages: GroupAges) -> None:
        self._items: dict[str, InFlightItem] = {}
        self._ages = ages
        self.num_grading = 0
        self.num_unrequested = 0
        self.num_sure = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(
        self,
        prompt: Prompt,
        attempt: Attempt,
        num_sequences: int,
        *,
        reserved_for: int | None = None,
    ) -> InFlightItem:
        """Take on a group.

        Args:
            prompt: what it is drawn for.
            visit: what was decided about it.
            num_sequences: room that its task will ask for when it runs.
            claims: the version in whose batch its place is certain, if any.
        """
        item = InFlightItem(prompt, attempt, attempt, num_sequences, self._enter_age)
        self._items[prompt.prompt_id] = item
        self.num_unrequested += num_sequences
        if reserved_for is not None:
            item.has_reservation = item.is_sure = True
            self.num_sure += 1
            self._ages.reserve(prompt.prompt_id, reserved_for)
        return item

    def asked(self, item: InFlightItem) -> None:
        """A group's sequences run, or wait in the queue, which counts them from here on."""
        self.num_unrequested -= item.num_unrequested
        item.num_unrequested = 0

    def start_grading(self, item: InFlightItem) -> None:
        """All samples of a group that were asked for are there."""
        self.num_grading += not item.is_grading
        item.is_grading = True

    def continue_group(self, item: InFlightItem, *, is_sure: bool) -> None:
        """More samples of a graded group are generated; sure to be kept, if those before differ."""
        self.num_grading -= item.is_grading
        item.is_grading = False
        is_sure = is_sure or item.has_reservation
        self.num_sure += is_sure - item.is_sure
        item.is_sure = is_sure

    def remove(self, item: InFlightItem) -> None:
        """Its task ends."""
        del self._items[item.prompt.prompt_id]
        self.num_grading -= item.is_grading
        self.num_sure -= item.is_sure
        self.asked(item)
        self._ages.left(item.prompt.prompt_id)

    def cancel(self, prompt_id: str, cancel_reason: CancelReason) -> None:
        """End a group's task."""
        self._items[prompt_id].cancel(cancel_reason)

    def cancel_all(self, cancel_reason: CancelReason) -> list[asyncio.Task[None]]:
        """End all tasks; returns them to be waited for."""
        for item in self._items.values():
            item.cancel(cancel_reason)
        return [item.task for item in self._items.values() if item.task is not None]

    def _enter_age(self, item: InFlightItem) -> None:
        prompt_id, version = item.prompt.prompt_id, item.start_version
        if self._items.get(prompt_id) is not item:
            return
        if version is None:
            self._ages.pauses(prompt_id)
        else:
            self._ages.runs(prompt_id, version)
