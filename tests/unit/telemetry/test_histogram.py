"""Buckets hold every value once, in order of size."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry.metrics import Histogram

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=50)
BOUNDS = st.lists(st.floats(-1e6, 1e6), max_size=8, unique=True).map(sorted)


@given(BOUNDS, VALUES)
def test_each_bucket_counts_the_values_up_to_its_bound(
    bounds: list[float], values: list[float]
) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    found = histogram.distribution()
    for bound, count in found.cumulative:
        assert count == sum(value <= bound for value in values)
    assert found.cumulative[-1] == (math.inf, len(values))
    assert found.count == len(values)
    assert math.isclose(found.total, math.fsum(values), abs_tol=1e-3)


def test_a_value_may_come_several_times_at_once() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(2.0, count=3)
    assert histogram.distribution().cumulative == ((1.0, 0), (2.0, 3), (math.inf, 3))
    assert histogram.distribution().total == 6.0
