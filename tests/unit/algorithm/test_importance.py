"""Truncated importance weights."""

from __future__ import annotations

import math

import pytest
import torch

from sluice.algorithm.importance import truncated_importance_weights
from sluice.errors import ConfigError

ROWS = torch.tensor([0, 0, 1, 1, 1])
OLD = torch.tensor([-1.0, -1.0, -2.0, -2.0, -2.0])
BEHAVIOR = torch.tensor([-1.5, -1.2, -1.5, -2.1, -30.0])


def weights(level: str, threshold: float = 2.0) -> torch.Tensor:
    return truncated_importance_weights(OLD, BEHAVIOR, ROWS, 2, level=level, threshold=threshold)


def test_token_weights_are_ratios_up_to_the_threshold() -> None:
    expected = [math.exp(0.5), math.exp(0.2), math.exp(-0.5), math.exp(0.1), 2.0]
    assert weights("token").tolist() == pytest.approx(expected)


def test_sequence_weights_are_the_truncated_ratio_of_whole_rows() -> None:
    expected = [math.exp(0.7)] * 2 + [5.0] * 3
    assert weights("sequence", 5.0).tolist() == pytest.approx(expected)


def test_sequences_are_truncated_after_the_sum_not_before() -> None:
    old, behavior = torch.tensor([0.0, -3.0]), torch.tensor([-3.0, 0.0])
    found = truncated_importance_weights(
        old, behavior, torch.tensor([0, 0]), 1, level="sequence", threshold=2.0
    )
    assert found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_policies_weigh_one(level: str) -> None:
    found = truncated_importance_weights(OLD, OLD, ROWS, 2, level=level, threshold=2.0)
    assert found.tolist() == [1.0] * 5


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_carry_no_gradient(level: str) -> None:
    old = OLD.clone().requires_grad_()
    found = truncated_importance_weights(old, BEHAVIOR, ROWS, 2, level=level, threshold=2.0)
    assert not found.requires_grad


def test_impossible_probabilities_stay_finite() -> None:
    found = truncated_importance_weights(
        torch.tensor([0.0, -500.0]),
        torch.tensor([-500.0, 0.0]),
        torch.tensor([0, 1]),
        2,
        level="token",
        threshold=1e12,
    )
    assert found.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_unknown_levels_and_thresholds_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown value 'row'; known: token, sequence"):
        weights("row")
    with pytest.raises(ConfigError, match=r"rollout_is_threshold = '0.0': expected .* > 0"):
        weights("token", 0.0)
