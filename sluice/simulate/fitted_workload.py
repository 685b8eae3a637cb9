"""A run's own groups as a workload: what happened is drawn again.

A group is drawn whole, outcome and lengths together. Drawing its samples anew by its pass rate
would find fewer mixed groups than there were: one right answer of 16 would come out as none of 16
in more than a third of the cases, while no uniform group would ever come out mixed. It is kept or
filtered as it was, too, whatever metric the filter looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from sluice.simulate.group_records import GroupRecord
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples

NUM_NEIGHBOURS = 128
"""Groups that one is drawn from: those whose versions are nearest. The policy learns."""

LONG_SHARE = 0.1


class FittedWorkload:
    """Recorded groups in the order they started, life after life of the reward service; beyond
    these, draws from groups of about the same version, with replacement.

    Args:
        records: kept or filtered ones, at least one.
        seed: decides which sample comes when, and what is drawn.
    """

    def __init__(self, records: Sequence[GroupRecord], seed: int = 0) -> None:
        self._records = sorted(records, key=_order)
        self._by_version = sorted(range(len(records)), key=lambda number: self._version(number))
        self._versions = [self._version(number) for number in self._by_version]
        self._seed = seed
        means = np.array([np.mean(record.tokens) for record in self._records])
        self._are_long = means > np.quantile(means, 1.0 - LONG_SHARE)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        """See `Workload`."""
        is_recorded = position < len(self._records)
        number = position if is_recorded else self._neighbour(position, version)
        record = self._records[number]
        return SimulatedPrompt(
            record.key, record.right / record.scored, bool(self._are_long[number]), number
        )

    def _version(self, number: int) -> int:
        return self._records[number].oldest_version or 0

    def _neighbour(self, position: int, version: int) -> int:
        size = min(NUM_NEIGHBOURS, len(self._records))
        middle = bisect_left(self._versions, version)
        last = bisect_left(self._versions, version + 1)
        first = min(max(0, (middle + last - size) // 2), len(self._records) - size)
        low, high = min(first, middle), max(first + size, last)
        draws = np.random.default_rng([self._seed, 4, position])
        return self._by_version[int(draws.integers(low, high))]

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        """See `Workload`. Samples beyond those recorded are drawn from them again."""
        record = self._records[prompt.number]
        draws = np.random.default_rng([self._seed, 5, position, num_restarts])
        num_recorded = min(len(record.tokens), record.scored)
        order = draws.permutation(num_recorded)
        more = draws.integers(0, num_recorded, max(0, num_samples - num_recorded))
        chosen = np.concatenate([order, more])[:num_samples]
        tokens = np.maximum(1, np.array(record.tokens))[chosen]
        are_right = (chosen < record.right).tolist()
        return SimulatedSamples(tokens.tolist(), are_right, _values(record, len(chosen)))


def _order(record: GroupRecord) -> tuple[int, float]:
    return record.life, record.started_s or 0.0


def _values(record: GroupRecord, num_samples: int) -> list[float] | None:
    """Of the filter's metric; ``None`` where the grades alone tell how the group ended.

    Which samples differed is not recorded, so these stand for the whole group only.
    """
    if record.is_decided_by_grades and record.scored >= min(num_samples, 2):
        return None
    return [float(number) if record.is_kept else 0.0 for number in range(num_samples)]
