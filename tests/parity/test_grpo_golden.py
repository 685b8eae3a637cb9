"""Group-normalised advantages against verl's numbers (reference sheet 2.1)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.group_advantages import grpo_advantages

ONE_WINNER_IN_SIXTEEN = [1.0] + [-1.0] * 15


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1.0, 1.0, 0.0, 0.0], [0.866024, 0.866024, -0.866024, -0.866024]),
        (ONE_WINNER_IN_SIXTEEN, [3.7499925] + [-0.2499995] * 15),
        ([1.0, -1.0, -2.0, 1.0], [0.833333, -0.5, -1.166666, 0.833333]),
    ],
)
def test_advantages_equal_verls(rewards: list[float], advantages: list[float]) -> None:
    found = grpo_advantages(np.array(rewards), norm_by_std=True)
    np.testing.assert_allclose(found, advantages, atol=1e-6)


def test_without_std_the_advantage_is_the_distance_from_the_mean() -> None:
    found = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]), norm_by_std=False)
    np.testing.assert_allclose(found, [0.75, -0.25, -0.25, -0.25])


def test_a_group_of_one_keeps_its_raw_reward() -> None:
    reward = np.array([-2.0])
    np.testing.assert_allclose(grpo_advantages(reward, norm_by_std=True), [-2.0 / (1.0 + 1e-6)])
    np.testing.assert_allclose(grpo_advantages(reward, norm_by_std=False), [-2.0])
