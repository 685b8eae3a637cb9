"""Overlong penalty against verl's numbers."""

from __future__ import annotations

import pytest

from sluice.algorithm.overlong import OverlongShaping


@pytest.mark.parametrize(
    ("num_response_tokens", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -0.000244140625), (18432, -0.5), (20480, -1.0)],
)
def test_penalty_equals_verls(num_response_tokens: int, penalty: float) -> None:
    assert OverlongShaping(20480, 4096, 1.0).penalty(num_response_tokens) == penalty
