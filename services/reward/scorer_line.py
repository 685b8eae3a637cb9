"""Who waits for a scorer process, and which requests go to one together.

A process answers one request at a time, and each answer costs two switches between processes: with
a quick rule and busy cores these take many times as long as the scoring. So whoever gets a process
takes along what waits behind, where scoring has been quick; slow scorers get request after request,
or one process would work through what several could share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.reward.scorer_messages import ScoreItem, ScorerAnswer

SHARED_SECONDS = 0.05
"""How long a request may be expected to take with what it takes along."""

SHARED_CHARS = 2**20
"""Characters of responses and ground truths that travel in one request, beyond its own."""

_NEWEST_SHARE = 0.3

SeatT = TypeVar("SeatT")
Answers = tuple[ScorerAnswer, ...]


class ScoringPace:
    """Seconds that an item has lately taken; unknown at first and after a fault."""

    def __init__(self) -> None:
        self._seconds_per_item: float | None = None

    def note(self, num_items: int, seconds: float) -> None:
        """A request of so many items was answered."""
        newest, known = seconds / num_items, self._seconds_per_item
        mean = newest if known is None else known + _NEWEST_SHARE * (newest - known)
        self._seconds_per_item = mean

    def forget(self) -> None:
        """A request failed: the next ones go alone."""
        self._seconds_per_item = None

    def num_items(self, seconds: float) -> int:
        """Items that are expected to take so long; 0 while the pace is unknown."""
        pace = self._seconds_per_item
        return 0 if pace is None else int(seconds / max(pace, 1e-6))


@dataclass(slots=True, eq=False)
class Waiting(Generic[SeatT]):
    """A request in the line.

    Attributes:
        items: to be scored.
        is_alone: whether it has to have a process of its own.
        turn: a seat of its own, or the answers that came with another request, or ``None``: that
            one failed, ask again.
    """

    items: Sequence[ScoreItem]
    is_alone: bool
    turn: asyncio.Future[SeatT | Answers | None] = field(default_factory=asyncio.Future)

    @property
    def num_chars(self) -> int:
        """Characters of the responses and the ground truths."""
        return sum(len(item.response) + len(item.ground_truth) for item in self.items)

    def settle(self, turn: SeatT | Answers | None) -> None:
        """Say what came of the wait, unless that was said or nobody waits any more."""
        if not self.turn.done():
            self.turn.set_result(turn)


class ScorerLine(Generic[SeatT]):
    """Idle seats, the last one used first, and the requests that wait for one, in turn."""

    def __init__(self) -> None:
        self._idle: list[SeatT] = []
        self._waiting: deque[Waiting[SeatT]] = deque()

    async def turn(self, items: Sequence[ScoreItem], *, is_alone: bool) -> SeatT | Answers | None:
        """Wait; see `Waiting.turn`. Who gets a seat puts it back with `put`."""
        if self._idle:
            return self._idle.pop()
        waiting = Waiting[SeatT](items, is_alone)
        self._waiting.append(waiting)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            self._leave(waiting)
            raise

    def put(self, seat: SeatT) -> None:
        """A seat is free: the first who waits gets it."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.turn.done():
                waiting.settle(seat)
                return
        self._idle.append(seat)

    def is_idle(self, seat: SeatT) -> bool:
        """Whether the next request may have it."""
        return seat in self._idle

    def take_out(self, seat: SeatT) -> None:
        """Nobody gets this idle seat until it is put back."""
        self._idle.remove(seat)

    def companions(self, num_items: int) -> tuple[Waiting[SeatT], ...]:
        """The next in line, with so many items at most; whoever takes them settles each."""
        taken: list[Waiting[SeatT]] = []
        num_chars = 0
        while self._waiting:
            waiting = self._waiting[0]
            num_items -= len(waiting.items)
            num_chars += waiting.num_chars
            if waiting.is_alone or num_items < 0 or num_chars > SHARED_CHARS:
                break
            taken.append(self._waiting.popleft())
        return tuple(taken)

    def _leave(self, waiting: Waiting[SeatT]) -> None:
        """A wait was cut short; a seat that it got meanwhile goes to the next."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if waiting.turn.cancelled() or not waiting.turn.done():
            return
        turn = waiting.turn.result()
        if turn is not None and not isinstance(turn, tuple):
            self.put(turn)
