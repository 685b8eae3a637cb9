"""Kept groups on their way into batches, by the rules of `algorithm.staleness`.

It keeps counts by version beside the groups, so that the rules, which look at every group, are
asked only when the counts leave something to decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from sluice.algorithm.admission import YieldEstimate, kept_upper_bound
from sluice.algorithm.staleness import (
    BatchDecision,
    InFlightGroup,
    KeptGroup,
    OnStale,
    doomed_groups,
    may_form_batch,
)
from sluice.simulate.group import SimulatedGroup


class Batching:
    """Kept and running groups, and the batches leased.

    Args:
        batch_size: B.
        max_staleness: S.
        on_stale: what happens to groups that would grow stale.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._on_stale: OnStale = on_stale
        self._kept: dict[int, SimulatedGroup] = {}
        self._started: dict[int, SimulatedGroup] = {}
        self._ages: dict[int, KeptGroup] = {}  # of the kept ones
        self._running: dict[int, InFlightGroup] = {}  # of the started ones
        self._num_kept: Counter[int] = Counter()  # by oldest version
        self._num_started: Counter[int] = Counter()  # by start version
        self._unpublished: list[int] = []

    @property
    def kept(self) -> tuple[SimulatedGroup, ...]:
        """Groups that wait for a batch."""
        return tuple(self._kept.values())

    @property
    def num_kept(self) -> int:
        """Groups that wait for a batch."""
        return len(self._kept)

    @property
    def num_in_training(self) -> int:
        """Groups leased under a version whose successor is not announced yet."""
        return len(self._unpublished) * self._batch_size

    def started(self, group: SimulatedGroup) -> None:
        """A replica draws tokens for a group from now on."""
        assert group.start_version is not None
        self._started[group.position] = group
        self._running[group.position] = InFlightGroup(group.name, group.start_version)
        self._num_started[group.start_version] += 1

    def left(self, group: SimulatedGroup) -> None:
        """A group runs no more; harmless if it never started."""
        if self._started.pop(group.position, None) is not None:
            assert group.start_version is not None
            del self._running[group.position]
            _take_one(self._num_started, group.start_version)

    def keep(self, group: SimulatedGroup) -> None:
        """Take on a kept group."""
        self._kept[group.position] = group
        self._ages[group.position] = KeptGroup(group.oldest_version, group.position)
        self._num_kept[group.oldest_version] += 1

    def remove(self, group: SimulatedGroup) -> None:
        """Give up a kept group."""
        del self._kept[group.position]
        _take_one(self._num_kept, self._ages.pop(group.position).oldest_version)

    def lease(self, groups: Sequence[SimulatedGroup], version: int) -> None:
        """The trainer takes a batch."""
        for group in groups:
            self.remove(group)
        self._unpublished.append(version)

    def published(self, version: int) -> None:
        """A version was announced."""
        self._unpublished = [leased for leased in self._unpublished if leased >= version]

    def next_version(self, announced: int) -> int:
        """Version of the next batch to be formed while `announced` is."""
        return max((announced, *(leased + 1 for leased in self._unpublished)))

    def decide(self, version: int, estimate: YieldEstimate) -> BatchDecision | None:
        """What to do towards the batch for `version`; ``None``: nothing."""
        oldest_allowed = version - self._max_staleness
        num_eligible = sum(n for v, n in self._num_kept.items() if oldest_allowed <= v <= version)
        has_dropped = any(v < oldest_allowed for v in self._num_kept)
        waits = self._on_stale == "wait" and oldest_allowed in self._num_started
        may_form = num_eligible >= self._batch_size and not waits
        if not (may_form or has_dropped or self._may_doom(version)):
            return None
        return may_form_batch(
            tuple(self._ages.values()),
            tuple(self._running.values()),
            version=version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
            on_stale=self._on_stale,
            kept_bound=partial(kept_upper_bound, estimate=estimate),
        )

    def doomed(self, announced: int) -> list[SimulatedGroup]:
        """Running groups that no batch will have a place for."""
        next_version = self.next_version(announced)
        if not self._may_doom(next_version):
            return []
        names = doomed_groups(
            tuple(self._ages.values()),
            tuple(self._running.values()),
            next_version=next_version,
            max_staleness=self._max_staleness,
            batch_size=self._batch_size,
        )
        return self.running(names)

    def running(self, names: Sequence[str]) -> list[SimulatedGroup]:
        """Running groups by name."""
        return [self._started[int(name)] for name in names]

    def drops(self, start_version: int, next_version: int) -> bool:
        """Whether a running group this old is dropped, not begun again."""
        return self._on_stale == "drop" and start_version < next_version - self._max_staleness

    def _may_doom(self, next_version: int) -> bool:
        """Whether `doomed_groups` would name any: the same condition, by counts."""
        if not self._num_started:
            return False
        oldest_allowed, oldest = next_version - self._max_staleness, min(self._num_started)
        if oldest < oldest_allowed:
            return True
        filled = 0
        for version in sorted(v for v in self._num_kept if v >= oldest_allowed):
            filled += self._num_kept[version]
            # Later versions have more places, and no more groups until the next kept one.
            last = max(version, oldest)
            if filled >= (last - oldest_allowed + 1) * self._batch_size:
                return True
        return False


def _take_one(counts: Counter[int], version: int) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]
