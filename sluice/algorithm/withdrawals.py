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

CLAIM_AFTER = 3
"""Withdrawals after which a group claims its place."""

CLAIMED_SHARE = 1 / 8
"""Share of a batch's places that may be claimed at a time; at least one place."""


class Withdrawals:
    """Withdrawn groups of one run, by prompt id, until a group of the prompt ends.

    Args:
        batch_size: B, groups in a train batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._most_claims = max(1, int(CLAIMED_SHARE * batch_size))
        self._times: dict[str, int] = {}
        self._claims: set[str] = set()

    def grants_claim(self, prompt_id: str) -> bool:
        """A group starts, perhaps once more; whether it holds a claim from here on."""
        is_due = self._times.get(prompt_id, 0) >= CLAIM_AFTER
        if is_due and len(self._claims) < self._most_claims:
            self._claims.add(prompt_id)
        return prompt_id in self._claims

    def withdrawn(self, prompt_id: str) -> None:
        """A group was broken off for want of a place, and will start again."""
        self._times[prompt_id] = self._times.get(prompt_id, 0) + 1
        self._claims.discard(prompt_id)

    def ended(self, prompt_id: str) -> None:
        """A group was kept, filtered or failed; harmless if it was never withdrawn."""
        self._times.pop(prompt_id, None)
        self._claims.discard(prompt_id)

    def forget(self) -> None:
        """Nothing was withdrawn."""
        self._times.clear()
        self._claims.clear()
