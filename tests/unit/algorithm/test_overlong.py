"""Bounds of the overlong penalty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.overlong import overlong_penalty
from sluice.errors import ConfigError


@given(st.integers(0, 100), st.integers(1, 100), st.floats(0, 5))
def test_the_penalty_lies_between_minus_the_factor_and_zero(
    length: int, buffer: int, factor: float
) -> None:
    penalty = overlong_penalty(
        length, max_response_tokens=100, buffer_tokens=buffer, penalty_factor=factor
    )
    longer = overlong_penalty(
        length + 1, max_response_tokens=100, buffer_tokens=buffer, penalty_factor=factor
    )
    assert -factor <= penalty <= 0.0
    assert longer <= penalty


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ConfigError, match=r"overlong_buffer.len must lie in 1..100.*got"):
        overlong_penalty(5, max_response_tokens=100, buffer_tokens=buffer, penalty_factor=1.0)


def test_a_negative_factor_is_refused() -> None:
    with pytest.raises(ConfigError, match="penalty_factor must be >= 0, got -1"):
        overlong_penalty(5, max_response_tokens=100, buffer_tokens=10, penalty_factor=-1.0)
