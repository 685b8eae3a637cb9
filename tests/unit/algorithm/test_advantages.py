"""Properties of group-normalised advantages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.group_advantages import grpo_advantages

Rewards = npt.NDArray[np.float64]

groups = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=32).map(np.array)


@given(groups, st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_keep_its_order(
    rewards: Rewards, norm_by_std: bool
) -> None:
    found = grpo_advantages(rewards, norm_by_std=norm_by_std)
    assert abs(found.sum()) < 1e-9
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(found[order]) >= 0.0).all()


@given(groups)
def test_normalised_advantages_have_unit_unbiased_std(
    rewards: Rewards,
) -> None:
    found = grpo_advantages(rewards, norm_by_std=True)
    if len(set(rewards.tolist())) > 1:
        assert found.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_equal_rewards_give_exactly_zero_however_they_round() -> None:
    assert (grpo_advantages(np.full(3, 0.1), norm_by_std=True) == 0.0).all()
