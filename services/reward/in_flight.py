"""The groups being generated or graded, each with the task that does it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.algorithm.group_ages import GroupAges
from sluice.algorithm.sampling.visit import Visit
from sluice.types import Prompt


class Fate(StrEnum):
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
    drawn_as: Visit
    visit: Visit
    num_unasked: int
    on_age: Callable[[InFlightItem], None]
    task: asyncio.Task[None] | None = None
    is_grading: bool = False
    has_claim: bool = False
    is_sure: bool = False
    num_requests: int = 0
    num_ungraded: int = 0
    fate: Fate = Fate.REQUEUED
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

    def cancel(self, fate: Fate) -> None:
        """End the task, once; the prompt meets `fate`."""
        if not self.is_cancelled and self.task is not None:
            self.fate, self.is_cancelled = fate, True
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
        self.num_unasked = 0
        self.num_sure = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(
        self, prompt: Prompt, visit: Visit, num_sequences: int, *, claims: int | None = None
    ) -> InFlightItem:
        """Take on a group.

        Args:
            prompt: what it is drawn for.
            visit: what was decided about it.
            num_sequences: room that its task will ask for when it runs.
            claims: the version in whose batch its place is certain, if any.
        """
        item = InFlightItem(prompt, visit, visit, num_sequences, self._enter_age)
        self._items[prompt.prompt_id] = item
        self.num_unasked += num_sequences
        if claims is not None:
            item.has_claim = item.is_sure = True
            self.num_sure += 1
            self._ages.claim(prompt.prompt_id, claims)
        return item

    def asked(self, item: InFlightItem) -> None:
        """A group's sequences run, or wait in the queue, which counts them from here on."""
        self.num_unasked -= item.num_unasked
        item.num_unasked = 0

    def start_grading(self, item: InFlightItem) -> None:
        """All samples of a group that were asked for are there."""
        self.num_grading += not item.is_grading
        item.is_grading = True

    def go_on(self, item: InFlightItem, *, is_sure: bool) -> None:
        """More samples of a graded group are generated; sure to be kept, if those before differ."""
        self.num_grading -= item.is_grading
        item.is_grading = False
        is_sure = is_sure or item.has_claim
        self.num_sure += is_sure - item.is_sure
        item.is_sure = is_sure

    def remove(self, item: InFlightItem) -> None:
        """Its task ends."""
        del self._items[item.prompt.prompt_id]
        self.num_grading -= item.is_grading
        self.num_sure -= item.is_sure
        self.asked(item)
        self._ages.left(item.prompt.prompt_id)

    def cancel(self, prompt_id: str, fate: Fate) -> None:
        """End a group's task."""
        self._items[prompt_id].cancel(fate)

    def cancel_all(self, fate: Fate) -> list[asyncio.Task[None]]:
        """End all tasks; returns them to be waited for."""
        for item in self._items.values():
            item.cancel(fate)
        return [item.task for item in self._items.values() if item.task is not None]

    def _enter_age(self, item: InFlightItem) -> None:
        prompt_id, version = item.prompt.prompt_id, item.start_version
        if self._items.get(prompt_id) is not item:
            return
        if version is None:
            self._ages.pauses(prompt_id)
        else:
            self._ages.runs(prompt_id, version)
