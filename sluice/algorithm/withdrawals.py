"""Which groups have been withdrawn, and which of them have a place for certain.

A group is withdrawn when a batch is full without it: it is broken off, and its prompt is drawn anew
by the next policy. Where an on-policy batch is filled on average (`admission`), that meets whatever
takes longest, so long answers would be withdrawn again and again, and seldom be trained. Therefore
a prompt that has been withdrawn `CLAIM_AFTER` times claims a place when it starts once more: it
counts as a kept group does, and is not withdrawn. The batch waits for it, and withdraws others for
it: so only few hold claims at a time, first come first served.

State without a clock or I/O, for the reward service and the simulator alike.
"""

from __future__ import annotations

RESERVE_AFTER = 3
"""Withdrawals after which a group claims its place."""

RESERVED_SHARE = 1 / 8
"""Share of a batch's places that may be claimed at a time; at least one place."""


class Preemptions:
    """Withdrawn groups of one run, by prompt id, until a group of the prompt ends.

    Args:
        batch_size: B, groups in a train batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._max_reserved = max(1, int(RESERVED_SHARE * batch_size))
        self._times: dict[str, int] = {}
        self._reserved_ids: set[str] = set()

    def reserves_slot(self, prompt_id: str) -> bool:
        """A group starts, perhaps once more; whether it holds a claim from here on."""
        is_due = self._times.get(prompt_id, 0) >= RESERVE_AFTER
        if is_due and len(self._reserved_ids) < self._max_reserved:
            self._reserved_ids.add(prompt_id)
        return prompt_id in self._reserved_ids

    def preempted(self, prompt_id: str) -> None:
        """A group was broken off for want of a place, and will start again."""
        self._times[prompt_id] = self._times.get(prompt_id, 0) + 1
        self._reserved_ids.discard(prompt_id)

    def ended(self, prompt_id: str) -> None:
        """A group was kept, filtered or failed; harmless if it was never withdrawn."""
        self._times.pop(prompt_id, None)
        self._reserved_ids.discard(prompt_id)

    def forget(self) -> None:
        """Nothing was withdrawn."""
        self._times.clear()
        self._reserved_ids.clear()
