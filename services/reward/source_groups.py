"""The states of a group, and the groups of one source by state and age."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.algorithm.groups.staleness import GroupAges


class GroupState(StrEnum):
    """Where a group is."""

    WAITING = "waiting"
    GENERATING = "generating"
    GRADING = "grading"
    KEPT = "kept"
    LEASED = "leased"
    ENDED = "ended"


IN_FLIGHT = frozenset({GroupState.GENERATING, GroupState.GRADING})


@dataclass(slots=True, eq=False)
class SourceGroups:
    """The groups of one source, counted. `GroupTable` alone writes the counts.

    Attributes:
        ages: its groups by version, for the staleness rules.
        counts: groups by state.
        num_sure: groups in flight that count as kept.
        num_reserved: groups in flight with a reserved slot.
    """

    ages: GroupAges
    counts: Counter[GroupState] = field(default_factory=Counter)
    num_sure: int = 0
    num_reserved: int = 0

    @property
    def num_in_flight(self) -> int:
        """Groups being generated or graded."""
        return self.counts[GroupState.GENERATING] + self.counts[GroupState.GRADING]

    @property
    def num_kept(self) -> int:
        """Groups that wait for a train batch."""
        return self.counts[GroupState.KEPT]
