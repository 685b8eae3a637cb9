"""Bounds of the overlong penalty."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.overlong import OverlongShaping


@given(st.integers(0, 100), st.integers(1, 100), st.floats(0, 5))
def test_the_penalty_lies_between_minus_the_factor_and_zero(
    length: int, buffer: int, factor: float
) -> None:
    shaping = OverlongShaping(100, buffer, factor)
    penalty, longer = shaping.penalty(length), shaping.penalty(length + 1)
    assert -factor <= penalty <= 0.0
    assert longer <= penalty
