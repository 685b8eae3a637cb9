"""Hold prompts that a service refused for lack of capacity, until they are sent again or given
up.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from sluice.client.policy_client import PromptEvent
from sluice.rpc.retries import RetryPolicy

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 3600.0
_MOST_CHARACTERS = 500


class HoldWarnings:
    """Warns of the first prompt that is held, and after pauses of 30 s, 1, 2, ... minutes, up to an
    hour, if one is held then: a submission that gets on by small steps is not talked over."""

    def __init__(self) -> None:
        self._next_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    def held(self, num_held: int, detail: str, now_s: float, full_for_s: float) -> None:
        """A prompt was refused for want of room, and waits.

        Args:
            num_held: prompts that wait, it among them.
            detail: why the service refused it.
            now_s: seconds, monotonic.
            full_for_s: seconds since a prompt got on, or since the first one was refused.
        """
        if self._next_s is not None:
            if now_s < self._next_s:
                return
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next_s = now_s + self._pause_s
        logger.warning(
            "prompts that wait for room: %d; nothing got on for %.0f s; the service says: %s",
            num_held,
            full_for_s,
            _on_one_line(detail),
        )


def _on_one_line(detail: str) -> str:
    """A terminal may be what shows it."""
    return "".join(c if c.isprintable() else " " for c in detail[:_MOST_CHARACTERS])


# Prompts that a service refused for want of room, until they are sent again or given up.
#
# One is sent again for each outcome, since it made room, and one after each pause, since others
# make room too; the pause grows while that fails. If it succeeds, two more follow at once, and
# two more after each of those that is accepted.
#
# So what is sent in vain is at most one for each outcome, two for each one that was accepted
# after a pause or in such a row, and one a pause. To that come those that were on their way when
# the room came to an end, and after a broken call all that it had open: each once.

# Whatever a policy says: a full service is not asked in a loop.
_LEAST_PAUSE_S = 0.05
_LEAST_SHARE = 0.5
_FOLLOW_A_LUCKY_ONE = 2


class RefusedPrompts:
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
