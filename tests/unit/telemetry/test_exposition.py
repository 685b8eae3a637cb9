"""Readings as Prometheus reads them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest
from sluice.telemetry.instruments import fleet

from sluice.errors import ConfigError
from sluice.telemetry.metrics import Histogram, InstrumentReading, counter, gauge, histogram
from sluice.telemetry.metrics_page import PROCESS_NAMES, MetricsPage
from tests.support.scraped import fetch, names, parsed, value

REPORTED = counter("sluice_reported_total", "times", "How often it was reported.", "who")
SAMPLED = counter("sluice_sampled_total", "times", "Of one that may restart.", may_restart=True)
LEVEL = gauge("sluice_level", "metres", 'Of the "water", with a \\ in it.')
SIZES = histogram("sluice_sizes", "metres", "Sizes.", (1.0, 2.5))


def page(*rounds: Iterable[InstrumentReading]) -> Any:
    pytest.importorskip("prometheus_client")
    waiting = list(rounds)
    with closing(MetricsPage(lambda: waiting.pop(0), "127.0.0.1", 0)) as served:
        texts = [fetch(f"127.0.0.1:{served.port}") for _ in rounds]
    return parsed(texts[-1])


def test_values_come_with_their_labels_and_odd_ones_survive() -> None:
    odd = 'a "quoted"\nline \\'
    found = page([REPORTED.at(2.0, "a"), LEVEL.at(math.nan), REPORTED.at(3.0, odd)])
    assert value(found, "sluice_reported_total", who="a") == 2.0
    assert value(found, "sluice_reported_total", who=odd) == 3.0
    assert math.isnan(value(found, "sluice_level"))


def test_a_histogram_has_buckets_sum_and_count() -> None:
    sizes = Histogram(SIZES.bounds)
    for size in (0.5, 2.0, 9.0):
        sizes.observe(size)
    found = page([SIZES.at(sizes.distribution())])
    assert [value(found, "sluice_sizes_bucket", le=le) for le in ("1.0", "2.5", "+Inf")] == [
        1,
        2,
        3,
    ]
    assert value(found, "sluice_sizes_sum") == 11.5
    assert value(found, "sluice_sizes_count") == 3
    assert set(SIZES.series) <= names(found)


def test_a_counter_that_takes_something_back_stands_still_and_a_gauge_falls() -> None:
    first, second = [REPORTED.at(5.0, "a"), LEVEL.at(5.0)], [REPORTED.at(3.0, "a"), LEVEL.at(3.0)]
    found = page(first, second)
    assert value(found, "sluice_reported_total", who="a") == 5.0
    assert value(found, "sluice_level") == 3.0
    assert (
        value(page(first, second, [REPORTED.at(6.0, "a")]), "sluice_reported_total", who="a") == 6.0
    )


def test_a_counter_of_something_that_restarted_falls_as_prometheus_expects() -> None:
    found = page([SAMPLED.at(5.0)], [SAMPLED.at(3.0)])
    assert value(found, "sluice_sampled_total") == 3.0


def test_a_replica_that_restarts_is_counted_from_0() -> None:
    assert fleet.REPLICA_TOKENS.may_restart
    assert not fleet.FLEET_TOKENS.may_restart


def test_the_process_tells_of_itself_by_the_usual_names() -> None:
    assert set(PROCESS_NAMES) == names(page([]))


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'sluice\[metrics\]'"):
        MetricsPage(list, "127.0.0.1", 0)
