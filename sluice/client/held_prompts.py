"""Prompts that a service refused for want of room, until they are sent again or given up.

One is sent again for each outcome, since it made room, and one after each pause, since others make
room too; the pause grows while that fails. If it succeeds, two more follow at once, and two more
after each of those that is accepted.

So what is sent in vain is at most one for each outcome, two for each one that was accepted after a
pause or in such a row, and one a pause. To that come those that were on their way when the room
came to an end, and after a broken call all that it had open: each once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from sluice.client.hold_warnings import HoldWarnings
from sluice.client.policy_client import PromptEvent
from sluice.client.retries import RetryPolicy

# Whatever a policy says: a full service is not asked in a loop.
_LEAST_PAUSE_S = 0.05
_LEAST_SHARE = 0.5
_FOLLOW_A_LUCKY_ONE = 2


class HeldPrompts:
    """The refusals of these prompts, by their ids, the longest held first.

    Args:
        policy: how long the pauses are, and with `gives_up` how long nothing may get on.
        gives_up: prompts are given up when patience has ended; else they are held until there is
            room. A policy without patience gives up at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        gives_up: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._clock = policy, clock
        self._gives_up = gives_up or policy.patience_s <= 0
        self._refusals: dict[str, PromptEvent] = {}
        self._capacity, self._lucky_capacity = 0, 0
        self._sent_on_luck: set[str] = set()
        self._num_pauses, self._next_pause_ends_s = 0, 0.0
        self._full_since_s: float | None = None
        self._warnings = HoldWarnings()

    def __len__(self) -> int:
        return len(self._refusals)

    def hold(self, refusal: PromptEvent) -> Sequence[PromptEvent]:
        """Takes a refused prompt in; gives back all that are given up, it among them."""
        now_s = self._clock()
        if self._full_since_s is None:
            self._full_since_s = now_s
        if not self._refusals and not self._sent_on_luck:
            self._num_pauses = 0
            self._next_pause_ends_s = now_s + self._pause_s()
        self._sent_on_luck.discard(refusal.prompt_id)
        self._refusals[refusal.prompt_id] = refusal
        if not self._gives_up or now_s - self._full_since_s < self._policy.patience_s:
            self._warnings.held(len(self), refusal.detail, now_s, now_s - self._full_since_s)
            return ()
        given_up = tuple(self._refusals.values())
        self._refusals.clear()
        return given_up

    def accepted(self, prompt_id: str) -> None:
        """A prompt was accepted, whether it was held before or not."""
        self._full_since_s = None
        if prompt_id in self._sent_on_luck:
            self._sent_on_luck.discard(prompt_id)
            self._num_pauses = 0
            self._lucky_capacity += _FOLLOW_A_LUCKY_ONE

    def drop(self, prompt_id: str) -> None:
        """A prompt is done with."""
        self._refusals.pop(prompt_id, None)
        self._sent_on_luck.discard(prompt_id)

    def ended(self) -> None:
        """A prompt ended: there is room for another."""
        self._full_since_s = None
        if self._refusals:
            self._capacity += 1

    def forget(self) -> None:
        """All are sent again, for another reason; whether there is room is not known."""
        self._full_since_s = None
        self._refusals.clear()
        self._sent_on_luck.clear()

    def take_due(self) -> str | None:
        """The id of the prompt to send again by this time; it is held no longer."""
        if not self._refusals:
            self._capacity, self._lucky_capacity = 0, 0
            return None
        now_s = self._clock()
        if self._capacity > 0:
            self._capacity -= 1
        elif self._lucky_capacity > 0:
            self._lucky_capacity -= 1
            self._sent_on_luck.add(next(iter(self._refusals)))
        elif now_s >= self._next_pause_ends_s:
            self._num_pauses = min(self._num_pauses + 1, 32)
            self._next_pause_ends_s = now_s + self._pause_s()
            self._sent_on_luck.add(next(iter(self._refusals)))
        else:
            return None
        prompt_id = next(iter(self._refusals))
        del self._refusals[prompt_id]
        return prompt_id

    def wait_s(self) -> float | None:
        """Seconds until one is due if nothing happens; ``None``: nothing is held."""
        if not self._refusals:
            return None
        return max(self._next_pause_ends_s - self._clock(), 0.0)

    def _pause_s(self) -> float:
        pause_s = min(self._policy.first_s * 2.0**self._num_pauses, self._policy.most_s)
        # Clients that found a service full together do not come back together.
        return max(pause_s, _LEAST_PAUSE_S) * random.uniform(_LEAST_SHARE, 1.0)
