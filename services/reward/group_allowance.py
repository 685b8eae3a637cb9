"""What bounds one group, whichever requests its samples are asked for by.

Consumes: starts, tokens and ends of the group's parts. Waits for: nothing. Produces: the values
that a deadline and a budget are measured by, and word to the parts under way when one changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sluice.types import TokenIds


@dataclass(slots=True, eq=False)
class GroupBudget:
    """The time and tokens of one group, shared by all of its requests.

    Attributes:
        first_start: when a replica took a part of it on first, in seconds of the event loop's
            clock.
        prompt_token_ids: its prompt as that replica reads it, or as one read it for an earlier
            service whose samples were taken up, [prompt tokens].
        num_tokens: response tokens that its parts hold, of unfinished samples too.
        has_finished_samples: any of its samples is complete.
        is_over: it has taken its time or its tokens.
        engine_answered: a replica answered a request for it with an error of its engine.
        engine_errors: why no replica could generate a sample, by its index.
    """

    first_start: float | None = None
    prompt_token_ids: TokenIds | None = None
    num_tokens: int = 0
    has_finished_samples: bool = False
    is_over: bool = False
    engine_answered: bool = False
    engine_errors: dict[int, str] = field(default_factory=dict)
    _observers: list[Callable[[], None]] = field(default_factory=list)

    def started(self, prompt_token_ids: TokenIds, now: float) -> None:
        """A replica took a part of it on."""
        if self.first_start is None:
            self.first_start, self.prompt_token_ids = now, prompt_token_ids
            self._notify()

    def read_as(self, prompt_token_ids: TokenIds) -> None:
        """Samples were taken up: it may be over before a replica takes a part of it on."""
        if self.prompt_token_ids is None:
            self.prompt_token_ids = prompt_token_ids

    def end(self) -> None:
        """It has taken its time or its tokens."""
        if not self.is_over:
            self.is_over = True
            self._notify()

    @contextmanager
    def observed(self, observer: Callable[[], None]) -> Iterator[None]:
        """Within it `follower` is told when the group starts or is over."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def _notify(self) -> None:
        for observer in tuple(self._observers):
            observer()
