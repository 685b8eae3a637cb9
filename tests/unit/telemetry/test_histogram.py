"""Buckets hold every value once, in order of size."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sluice.telemetry.metric_names import instrument
from sluice.telemetry.metrics import Distribution, Histogram

NAME = "sluice_reward_staleness_versions"
VALUES = st.lists(st.one_of(st.integers(-2, 40), st.floats(-1e6, 1e6)), max_size=50)


@given(VALUES)
def test_each_bucket_counts_the_values_up_to_its_bound(values: list[float]) -> None:
    histogram = Histogram(NAME)
    for value in values:
        histogram.observe(value)
    found = histogram.reading().value
    assert isinstance(found, Distribution)
    assert [bound for bound, _ in found.cumulative] == [*instrument(NAME).bounds, math.inf]
    for bound, count in found.cumulative:
        assert count == sum(value <= bound for value in values)
    assert math.isclose(found.total, math.fsum(values), abs_tol=1e-3)
