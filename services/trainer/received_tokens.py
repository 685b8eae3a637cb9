"""Tokens that the reward service received, over all of its starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from sluice.algorithm.accounts import RECEIVED

_PREFIX = "reward/tokens/"
_TOTAL = f"{_PREFIX}received"
_PENDING, _ABORTED = "pending", "aborted"


class ReceivedTokens:
    """Adds up what services that started one after the other have counted.

    A service that starts anew counts from 0. What the one before held at the time, nobody trains
    on any more: it counts as aborted. What that one counted after it was last asked is not known.
    """

    def __init__(self) -> None:
        self._earlier = Counter[str]()
        self._latest: Mapping[str, float] | None = None
        self._latest_total = 0.0

    def update(self, statistics: Mapping[str, float]) -> None:
        """Takes a service's statistics; ones without token counts change nothing."""
        total = statistics.get(_TOTAL)
        if total is None:
            return
        if self._latest is not None and total < self._latest_total:
            lost = dict(self._latest)
            lost[_ABORTED] += lost.pop(_PENDING)
            self._earlier.update(lost)
        self._latest_total = total
        self._latest = {name: statistics.get(_PREFIX + name, 0.0) for name in RECEIVED}

    def by_use(self) -> Mapping[str, float] | None:
        """Tokens by what became of them (`RECEIVED`); None before any were told."""
        if self._latest is None:
            return None
        return {name: self._earlier[name] + count for name, count in self._latest.items()}
