"""Readings in Prometheus' text format; the one file that imports prometheus_client, on demand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sluice.errors import ConfigError
from sluice.telemetry.histogram import Distribution
from sluice.telemetry.instrument import Instrument, Kind, Reading

__all__ = ["CONTENT_TYPE", "PROCESS_NAMES", "Exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROCESS_NAMES = (
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
)
"""What prometheus_client's own collector adds, by names that all of its users share."""


class Exposition:
    """A page of metrics.

    Args:
        read: all readings as they stand; called once a page.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        except ImportError as error:
            raise ConfigError(
                "metrics_port needs the package prometheus_client, which is not installed; run "
                "pip install 'sluice[metrics]', or take metrics_port out"
            ) from error
        self._registry, self._generate = CollectorRegistry(), generate_latest
        ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(read))
        self._lock = threading.Lock()

    def page(self) -> bytes:
        """All metrics as text. Any thread may ask; one is served at a time."""
        with self._lock:
            text: bytes = self._generate(self._registry)
        return text


class _Collector:
    """Turns readings into prometheus_client's families, in the order in which they come."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def describe(self) -> Iterable[Any]:
        return ()

    def collect(self) -> Iterator[Any]:
        families: dict[Instrument, list[Reading]] = {}
        for reading in self._read():
            families.setdefault(reading.instrument, []).append(reading)
        for instrument, readings in families.items():
            family = _family(instrument)
            for reading in readings:
                self._add(family, reading)
            yield family

    def _add(self, family: Any, reading: Reading) -> None:  # noqa: ANN401  the package's families
        value = reading.value
        if isinstance(value, Distribution):
            buckets = [(_bound(bound), float(count)) for bound, count in value.cumulative]
            family.add_metric(reading.labels, buckets, value.total)
        elif reading.instrument.kind is Kind.COUNTER:
            family.add_metric(reading.labels, self._risen(reading, value))
        else:
            family.add_metric(reading.labels, value)

    def _risen(self, reading: Reading, value: float) -> float:
        """A counter that fell would be taken for one that began anew, and all of it for new."""
        if reading.instrument.may_restart:
            return value
        key = (reading.instrument.name, reading.labels)
        self._highest[key] = max(value, self._highest.get(key, 0.0))
        return self._highest[key]


def _family(instrument: Instrument) -> Any:  # noqa: ANN401  the package's families
    from prometheus_client import core

    kinds = {
        Kind.COUNTER: core.CounterMetricFamily,
        Kind.GAUGE: core.GaugeMetricFamily,
        Kind.HISTOGRAM: core.HistogramMetricFamily,
    }
    text = f"{instrument.meaning} Unit: {instrument.unit}."
    return kinds[instrument.kind](instrument.name, text, labels=instrument.labels)


def _bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else str(float(value))
