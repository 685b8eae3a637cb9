"""Readings as Prometheus reads them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest

from sluice.errors import ConfigError
from sluice.telemetry.metric_names import Instrument, instrument
from sluice.telemetry.metrics import (
    Histogram,
    InstrumentReading,
    MetricsPage,
    reading,
)
from tests.support.scraped import PROCESS_NAMES, fetch, names, parsed, value

REFUSALS, TOKENS = "sluice_quota_refusals_total", "sluice_fleet_replica_tokens_total"
LEVEL = Instrument(name="sluice_level", unit="metres", meaning='Of the "water", with a \\ in it.')
SIZES = "sluice_reward_staleness_versions"


def page(*rounds: Iterable[InstrumentReading]) -> Any:
    pytest.importorskip("prometheus_client")
    waiting = list(rounds)
    with closing(MetricsPage(lambda: waiting.pop(0), "127.0.0.1", 0)) as served:
        texts = [fetch(f"127.0.0.1:{served.port}") for _ in rounds]
    return parsed(texts[-1])


def test_values_come_with_their_labels_and_odd_ones_survive() -> None:
    odd = 'a "quoted"\nline \\'
    found = page(
        [
            reading(REFUSALS, 2.0, "a"),
            InstrumentReading(LEVEL, math.nan),
            reading(REFUSALS, 3.0, odd),
        ]
    )
    assert value(found, REFUSALS, limit="a") == 2.0
    assert value(found, REFUSALS, limit=odd) == 3.0
    assert math.isnan(value(found, "sluice_level"))


def test_a_histogram_has_buckets_sum_and_count() -> None:
    sizes = Histogram(SIZES)
    for size in (0, 2, 99):
        sizes.observe(size)
    found = page([sizes.reading()])
    counts = [value(found, f"{SIZES}_bucket", le=le) for le in ("0.0", "1.0", "2.0", "+Inf")]
    assert counts == [1, 1, 2, 3]
    assert value(found, f"{SIZES}_sum") == 101
    assert value(found, f"{SIZES}_count") == 3
    assert set(instrument(SIZES).series) <= names(found)


def test_a_counter_that_takes_something_back_stands_still_and_a_gauge_falls() -> None:
    rounds = [
        [reading(REFUSALS, number, "a"), InstrumentReading(LEVEL, number)] for number in (5, 3, 6)
    ]
    found = page(*rounds[:2])
    assert value(found, REFUSALS, limit="a") == 5.0
    assert value(found, "sluice_level") == 3.0
    assert value(page(*rounds), REFUSALS, limit="a") == 6.0


def test_a_counter_of_something_that_restarted_falls_as_prometheus_expects() -> None:
    found = page([reading(TOKENS, 5.0, "a")], [reading(TOKENS, 3.0, "a")])
    assert value(found, TOKENS, replica="a") == 3.0


def test_a_replica_that_restarts_is_counted_from_0() -> None:
    assert instrument(TOKENS).may_restart
    assert not instrument("sluice_fleet_tokens_total").may_restart


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
