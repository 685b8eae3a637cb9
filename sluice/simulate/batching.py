"""Kept groups on their way into batches, by the rules of `algorithm.staleness`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sluice.algorithm.admission import YieldEstimate, kept_upper_bound
from sluice.algorithm.group_ages import GroupAges
from sluice.algorithm.staleness import BatchDecision, OnStale
from sluice.simulate.group import SimulatedGroup


class Batching:
    """Kept and running groups, and the batches leased.

    Args:
        batch_size: B.
        max_staleness: S.
        on_stale: what happens to groups that would grow stale.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size = batch_size
        self._ages = GroupAges(batch_size, max_staleness, on_stale)
        self._kept: dict[str, SimulatedGroup] = {}
        self._started: dict[str, SimulatedGroup] = {}
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

    def reserve(self, group: SimulatedGroup, version: int) -> None:
        """A group is issued whose place in the batch for `version` is certain."""
        self._started[group.name] = group
        self._ages.reserve(group.name, version)

    def started(self, group: SimulatedGroup) -> None:
        """A replica draws tokens for a group from now on."""
        assert group.start_version is not None
        self._started[group.name] = group
        self._ages.runs(group.name, group.start_version)

    def left(self, group: SimulatedGroup) -> None:
        """A group runs no more; harmless if it never started."""
        self._started.pop(group.name, None)
        self._ages.left(group.name)

    def keep(self, group: SimulatedGroup) -> None:
        """Take on a kept group."""
        self._kept[group.name] = group
        self._ages.keep(group.name, group.oldest_version, group.position)

    def remove(self, group: SimulatedGroup) -> None:
        """Give up a kept group."""
        del self._kept[group.name]
        self._ages.remove(group.name)

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

    def decide(self, version: int, estimate: YieldEstimate) -> BatchDecision:
        """What to do towards the batch for `version`."""
        return self._ages.decide(version, partial(kept_upper_bound, estimate=estimate))

    def expired(self, announced: int) -> list[SimulatedGroup]:
        """Running groups that no batch will have a place for."""
        return self.running(self._ages.expired(self.next_version(announced)))

    def running(self, names: Sequence[str]) -> list[SimulatedGroup]:
        """Running groups by name."""
        return [self._started[name] for name in names]

    def kept_groups(self, names: Sequence[str]) -> list[SimulatedGroup]:
        """Kept groups by name."""
        return [self._kept[name] for name in names]

    def drops(self, group: SimulatedGroup, next_version: int) -> bool:
        """Whether a doomed group is dropped, not begun again."""
        return self._ages.drops(group.name, next_version)
