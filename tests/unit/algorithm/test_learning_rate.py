"""Learning-rate schedules by train batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.learning_rate import (
    learning_rate_multiplier,
    resolve_warmup_steps,
)

SCHEDULES = ("constant", "cosine", "linear", "inverse_square_root")


def multipliers(schedule: str, steps: list[int], min_lr_ratio: float = 0.0) -> list[float]:
    return [
        learning_rate_multiplier(
            step, schedule=schedule, warmup_steps=5, total_steps=65, min_lr_ratio=min_lr_ratio
        )
        for step in steps
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_starts_at_zero_and_ends_at_one(schedule: str) -> None:
    assert multipliers(schedule, [0, 1, 4, 5]) == [0.0, 0.2, 0.8, 1.0]


def test_linear_ends_at_the_minimum() -> None:
    found = multipliers("linear", [35, 65, 80], min_lr_ratio=0.05)
    assert found == pytest.approx([0.525, 0.05, 0.05])


def test_cosine_passes_the_middle_and_ends_at_the_minimum() -> None:
    found = multipliers("cosine", [20, 35, 65, 80], min_lr_ratio=0.1)
    assert found == pytest.approx([0.868198, 0.55, 0.1, 0.1], abs=1e-6)


def test_constant_stays_at_one() -> None:
    assert multipliers("constant", [5, 64, 1000]) == [1.0, 1.0, 1.0]


def test_without_warm_up_the_first_batch_has_the_full_rate() -> None:
    found = learning_rate_multiplier(0, schedule="cosine", warmup_steps=0, total_steps=10)
    assert found == 1.0


def test_warm_up_steps_beat_the_ratio_and_unset_ones_follow_it() -> None:
    assert resolve_warmup_steps(10, 0.5, 100) == 10
    assert resolve_warmup_steps(-1, 0.05, 100) == 5
    assert resolve_warmup_steps(0, 0.0, 100) == 0


@given(st.sampled_from(SCHEDULES), st.integers(0, 200), st.integers(0, 50), st.floats(0, 1))
def test_after_warm_up_the_rate_never_rises_nor_leaves_its_bounds(
    schedule: str, step: int, warmup_steps: int, min_lr_ratio: float
) -> None:
    now, later = (
        learning_rate_multiplier(
            warmup_steps + step + ahead,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=100,
            min_lr_ratio=min_lr_ratio,
        )
        for ahead in (0, 1)
    )
    assert min_lr_ratio - 1e-12 <= later <= now + 1e-12 <= 1.0 + 2e-12


def test_inverse_square_root_halves_at_four_times_the_warm_up() -> None:
    assert multipliers("inverse_square_root", [5, 20, 45]) == pytest.approx([1.0, 0.5, 1 / 3])
    assert multipliers("inverse_square_root", [500], min_lr_ratio=0.2) == [0.2]
