"""A sweep over replicas and staleness; it recommends the cheapest that keep the trainer busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.strategies import OpenWorkload

TOLERANCE = 0.02
"""A step rate this much (relative) below the best is as good."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One fleet size and one bound."""

    num_replicas: int
    max_staleness: int
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points, and the recommended one."""

    points: tuple[SweepPoint, ...]
    recommended: SweepPoint

    @property
    def is_at_edge(self) -> bool:
        """Whether the recommended fleet or bound is the largest, so that more may be better."""
        sizes = max(point.num_replicas for point in self.points)
        bounds = max(point.max_staleness for point in self.points)
        return self.recommended.num_replicas == sizes or self.recommended.max_staleness == bounds


def sweep(
    settings: SimulationSettings,
    open_workload: OpenWorkload,
    replicas: Sequence[int],
    bounds: Sequence[int],
    on_step: Callable[[int], None] | None = None,
) -> Sweep:
    """Simulate every fleet size with every bound.

    Args:
        settings: everything else.
        open_workload: the same data set for each.
        replicas: fleet sizes.
        bounds: values of S.
        on_step: called after each step of each simulation.

    Raises:
        BatchUnfillableError: the workload is hopeless.
    """
    points = tuple(
        SweepPoint(
            number, bound, simulate(_at(settings, number, bound), open_workload(), on_step=on_step)
        )
        for number in replicas
        for bound in bounds
    )
    return Sweep(points, recommend(points))


def recommend(points: Sequence[SweepPoint]) -> SweepPoint:
    """Return the fewest replicas, then the smallest S, within `TOLERANCE` of the best step rate."""
    best = max(point.result.steps_per_hour for point in points)
    good = [p for p in points if p.result.steps_per_hour >= (1.0 - TOLERANCE) * best]
    return min(good, key=lambda point: (point.num_replicas, point.max_staleness))


def grid_around(num_replicas: int, max_staleness: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return fleet sizes from a quarter to four times as many, and bounds from 0 to at least 4."""
    sizes = {
        max(1, round(num_replicas * factor)) for factor in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
    }
    return tuple(sorted(sizes)), tuple(sorted({0, 1, 2, 4, max_staleness}))


def _at(settings: SimulationSettings, num_replicas: int, bound: int) -> SimulationSettings:
    return replace(
        settings,
        rules=replace(settings.rules, max_staleness=bound),
        fleet=replace(settings.fleet, num_replicas=num_replicas),
    )
