"""How the batches so far came about: how long each took to fill, and how old its responses were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sluice.telemetry.histogram import Histogram
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import reward
from sluice.types import TrainGroup

__all__ = ["BatchHistory"]


class BatchHistory:
    """Takes every batch as it is formed."""

    def __init__(self) -> None:
        self._fill_s = Histogram(reward.BATCH_FILL_SECONDS.bounds)
        self._staleness = Histogram(reward.STALENESS.bounds)
        self.num_formed = 0

    def formed(self, groups: Sequence[TrainGroup], version: int, fill_s: float) -> None:
        """A batch for `version` was formed, `fill_s` seconds after the one before."""
        self.num_formed += 1
        self._fill_s.observe(fill_s)
        for group in groups:
            for rollout in group.rollouts:
                if rollout.oldest_version is not None:
                    self._staleness.observe(version - rollout.oldest_version)

    def readings(self) -> Iterator[Reading]:
        """All of them."""
        yield reward.BATCH_FILL_SECONDS.at(self._fill_s.distribution())
        yield reward.STALENESS.at(self._staleness.distribution())
