"""Hold prompts that a full service refused, until they are sent again or given up.

One held prompt is sent again for each outcome, which frees capacity, and one after each pause,
because other clients' prompts end too. The pause grows while that fails. Each one that is accepted
lets another follow at once.

So the number of vain tries is at most one for each outcome and one for each pause. Prompts that
were in flight when the service became full, and all open ones after a broken call, add one each.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from sluice.client.prompts import PromptEvent
from sluice.rpc.retries import RetryPolicy

logger = logging.getLogger(__name__)

_FIRST_WARNING_PAUSE_S = 30.0
_LONGEST_WARNING_PAUSE_S = 3600.0
_MOST_CHARACTERS = 500
# However short a policy's pauses are, a full service is not called in a tight loop.
_LEAST_PAUSE_S = 0.025


class RefusedPrompts:
    """Refused prompts by id, the longest held first.

    Args:
        policy: the pauses, and with `gives_up` the patience without progress.
        gives_up: give prompts up when patience has ended; otherwise hold them until they are
            accepted. A policy without patience gives up at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        gives_up: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._gives_up = gives_up or policy.patience_s <= 0
        self._refusals: dict[str, PromptEvent] = {}
        self._tried: set[str] = set()  # released, and not answered yet
        self._capacity = 0
        self._num_pauses = 0
        self._next_pause_ends_s = 0.0
        self._full_since_s: float | None = None
        self._next_warning_s = -math.inf
        self._warning_pause_s = _FIRST_WARNING_PAUSE_S / 2

    def __len__(self) -> int:
        return len(self._refusals)

    def hold(self, refusal: PromptEvent) -> Sequence[PromptEvent]:
        """Hold a refused prompt, and return all that are given up."""
        now_s = self._clock()
        if self._full_since_s is None:
            self._full_since_s = now_s
        if not self._refusals and not self._tried:
            self._num_pauses = 0
            self._next_pause_ends_s = now_s + self._pause_s()
        self._tried.discard(refusal.prompt_id)
        self._refusals[refusal.prompt_id] = refusal
        if not self._gives_up or now_s - self._full_since_s < self._policy.patience_s:
            self._warn(refusal.detail, now_s, now_s - self._full_since_s)
            return ()
        given_up = tuple(self._refusals.values())
        self._refusals.clear()
        return given_up

    def accepted(self, prompt_id: str) -> None:
        """Note an accepted prompt, held before or not."""
        self._full_since_s = None
        if prompt_id in self._tried:
            self._tried.discard(prompt_id)
            self._num_pauses = 0
            self._capacity += 1

    def drop(self, prompt_id: str) -> None:
        """Forget a prompt that is done."""
        self._refusals.pop(prompt_id, None)
        self._tried.discard(prompt_id)

    def ended(self) -> None:
        """Note an ended prompt, which frees capacity for another."""
        self._full_since_s = None
        if self._refusals:
            self._capacity += 1

    def forget(self) -> None:
        """Forget all held prompts: a new call sends them again."""
        self._full_since_s = None
        self._refusals.clear()
        self._tried.clear()

    def take_due(self) -> str | None:
        """Release the prompt to send again now and return its id; ``None``: there is none."""
        if not self._refusals:
            self._capacity = 0
            return None
        now_s = self._clock()
        if self._capacity > 0:
            self._capacity -= 1
        elif now_s >= self._next_pause_ends_s:
            self._num_pauses += 1
            self._next_pause_ends_s = now_s + self._pause_s()
        else:
            return None
        prompt_id = next(iter(self._refusals))
        del self._refusals[prompt_id]
        self._tried.add(prompt_id)
        return prompt_id

    def wait_s(self) -> float | None:
        """Return the seconds until a prompt is due if nothing happens; ``None``: none is held."""
        if not self._refusals:
            return None
        return max(self._next_pause_ends_s - self._clock(), 0.0)

    def _pause_s(self) -> float:
        return max(self._policy.pause_s(self._num_pauses), _LEAST_PAUSE_S)

    def _warn(self, detail: str, now_s: float, full_for_s: float) -> None:
        """Warn at the first held prompt, then after 30 s, 1, 2, ... 60 minutes.

        The growing pauses keep the log readable for a submission that advances in small steps.
        """
        if now_s < self._next_warning_s:
            return
        self._warning_pause_s = min(2 * self._warning_pause_s, _LONGEST_WARNING_PAUSE_S)
        self._next_warning_s = now_s + self._warning_pause_s
        # A terminal may show the service's text, so it must be printable.
        printable = "".join(c if c.isprintable() else " " for c in detail[:_MOST_CHARACTERS])
        logger.warning(
            "prompts that wait for capacity: %d; no progress for %.0f s; the service: %s",
            len(self),
            full_for_s,
            printable,
        )
