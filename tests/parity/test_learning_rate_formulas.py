"""Learning-rate multipliers against their formulas; steps are train batches."""

from __future__ import annotations

from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.learning_rate import learning_rate_multiplier, resolve_warmup_steps

SCHEDULES = ("constant", "cosine", "linear", "inverse_square_root")
TOTAL = 40


def formula(
    schedule: str, step: int, warmup: int, min_ratio: float = 0.0, cycles: float = 0.5
) -> float:
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, TOTAL - warmup)
    if schedule == "cosine":
        wave = (cos(2 * pi * cycles * progress) + 1) / 2
        return min_ratio + (1 - min_ratio) * wave
    if schedule == "linear":
        return min_ratio + (1 - min_ratio) * (1 - progress)
    if schedule == "inverse_square_root":
        return max(min_ratio, (max(warmup, 1) / max(step, 1)) ** 0.5)
    return 1.0


@pytest.mark.parametrize("min_ratio", [0.0, 0.3])
@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step_of_a_run_equals_the_formula(
    schedule: str, warmup: int, min_ratio: float
) -> None:
    found = [
        learning_rate_multiplier(
            step,
            schedule=schedule,
            warmup_steps=warmup,
            total_steps=TOTAL,
            min_lr_ratio=min_ratio,
        )
        for step in range(TOTAL)
    ]
    expected = [formula(schedule, step, warmup, min_ratio) for step in range(TOTAL)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("cycles", [0.25, 0.5, 1.0, 2.5])
def test_cosine_rides_as_many_waves_as_are_asked_for(cycles: float) -> None:
    found = [
        learning_rate_multiplier(
            step, schedule="cosine", warmup_steps=4, total_steps=TOTAL, num_cycles=cycles
        )
        for step in range(TOTAL)
    ]
    expected = [formula("cosine", step, 4, cycles=cycles) for step in range(TOTAL)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("steps", "ratio", "warmup"), [(10, 0.5, 10), (-1, 0.1, 4), (0, 0.26, 10), (-1, 0.0, 0)]
)
def test_warm_up_by_steps_goes_before_the_ratio(steps: int, ratio: float, warmup: int) -> None:
    assert resolve_warmup_steps(steps, ratio, TOTAL) == warmup


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
