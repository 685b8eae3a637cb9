"""Counters of several processes that stand for one moment, though they were read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.algorithm.accounts import Account, ReplicaCounters, token_account

__all__ = ["TokenReading"]


@dataclass(frozen=True, slots=True)
class TokenReading:
    """The fleet's counters, read between two readings of the reward service's.

    Tokens flow from the fleet to the service all the time, so no two readings fit. But what came in
    between the service's two is known, and a token that came in after the fleet was read was drawn:
    by then it was under way, or drawn even later.

    Attributes:
        before: tokens that the reward service had got, by what became of them.
        fleet: sums over the replicas, read after `before`.
        after: as `before`, read when all replicas had answered.
    """

    before: Mapping[str, float]
    fleet: ReplicaCounters
    after: Mapping[str, float]

    @property
    def moved_tokens(self) -> int:
        """Tokens that the reward service got between its two readings.

        The residual may be off by so many at most.
        """
        return max(0, round(sum(self.after.values()) - sum(self.before.values())))

    def account(self) -> Account:
        """The tokens by what became of them, at the moment of `after`.

        Tokens that were sent and have not been received are in the residual; so are those that were
        received and not sent, but for `moved_tokens` of them.
        """
        fleet = self.fleet
        unknown = round(sum(self.after.values())) - fleet.sent_tokens
        late = min(max(0, unknown), self.moved_tokens)
        sampled_late = max(0, late - fleet.running_tokens)
        at_the_end = replace(
            fleet,
            generated_tokens=fleet.generated_tokens + sampled_late,
            running_tokens=fleet.running_tokens + sampled_late - late,
        )
        return token_account(at_the_end, self.after)
