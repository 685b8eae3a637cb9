"""Learning-rate multipliers against their formulas; steps are train batches."""

from __future__ import annotations

from math import cos, pi

import pytest

from sluice.algorithm.learning_rate import learning_rate_multiplier, resolve_warmup_steps

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
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "inverse_square_root"])
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
def test_cosine_rides_as_many_waves_as_it_is_told(cycles: float) -> None:
    found = [
        learning_rate_multiplier(
            step, schedule="cosine", warmup_steps=4, total_steps=TOTAL, num_cycles=cycles
        )
        for step in range(TOTAL)
    ]
    expected = [formula("cosine", step, 4, cycles=cycles) for step in range(TOTAL)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step", "multiplier"),
    [
        ("constant", 0, 0.0),  # the first update of a run with warm-up has rate 0
        ("constant", 3, 0.3),
        ("cosine", 25, 0.5),
        ("linear", 25, 0.5),
        ("inverse_square_root", 10, 1.0),
        ("inverse_square_root", 40, 0.5),
        ("inverse_square_root", 90, 0.333333),
    ],
)
def test_known_points_after_ten_batches_of_warm_up(
    schedule: str, step: int, multiplier: float
) -> None:
    found = learning_rate_multiplier(step, schedule=schedule, warmup_steps=10, total_steps=TOTAL)
    assert found == pytest.approx(multiplier, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "ratio", "warmup"), [(10, 0.5, 10), (-1, 0.1, 4), (0, 0.26, 10), (-1, 0.0, 0)]
)
def test_warm_up_by_steps_goes_before_the_ratio(steps: int, ratio: float, warmup: int) -> None:
    assert resolve_warmup_steps(steps, ratio, TOTAL) == warmup
