"""A metric that Prometheus may read: declared once, with its unit, and read when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.telemetry.histogram import Distribution

__all__ = ["Instrument", "Kind", "Reading", "counter", "gauge", "histogram"]


class Kind(StrEnum):
    """What may be done with a metric: a counter never falls within the life of what it counts."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric without its value.

    Attributes:
        name: as it is exported, with its unit; a counter's ends with ``_total``.
        kind: see `Kind`.
        unit: of one count, in words.
        meaning: one sentence.
        labels: names of its labels, in order.
        bounds: of a histogram's buckets.
        may_restart: what a counter counts may begin anew while the process lives; then it falls to
            what was counted since, from which Prometheus sees that it did.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    may_restart: bool = False

    def at(self, value: float | Distribution, *labels: str) -> Reading:
        """It stands at `value`, for these values of its labels."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name}: {len(labels)} labels given, {self.labels} wanted")
        return Reading(self, value, labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query can use: a histogram has three."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of an instrument."""

    instrument: Instrument
    value: float | Distribution
    labels: tuple[str, ...] = ()


def counter(
    name: str, unit: str, meaning: str, *labels: str, may_restart: bool = False
) -> Instrument:
    """A count since the process's start, or since what it counts began."""
    return Instrument(name, Kind.COUNTER, unit, meaning, labels, may_restart=may_restart)


def gauge(name: str, unit: str, meaning: str, *labels: str) -> Instrument:
    """A value that rises and falls."""
    return Instrument(name, Kind.GAUGE, unit, meaning, labels)


def histogram(name: str, unit: str, meaning: str, bounds: tuple[float, ...]) -> Instrument:
    """How often values of each size came."""
    return Instrument(name, Kind.HISTOGRAM, unit, meaning, (), bounds)
