"""Overlong penalty against verl's numbers (reference sheet 3.3)."""

from __future__ import annotations

import pytest

from sluice.algorithm.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("num_response_tokens", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -0.000244140625), (18432, -0.5), (20480, -1.0)],
)
def test_penalty_equals_verls(num_response_tokens: int, penalty: float) -> None:
    found = overlong_penalty(
        num_response_tokens, max_response_tokens=20480, buffer_tokens=4096, penalty_factor=1.0
    )
    assert found == penalty
