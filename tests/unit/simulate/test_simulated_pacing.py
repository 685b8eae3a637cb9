"""Prompts that take long start early in a version's time: batches wait less, and none is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import SimulationResult, simulate
from tests.unit.simulate.simulations import SmallWorkload, small


def _simulated(
    *, paces: bool, max_staleness: int = 1, recorder: SimulationRecorder | None = None
) -> SimulationResult:
    settings = small(batch_size=12, max_staleness=max_staleness, num_steps=60)
    rules = replace(settings.rules, paces=paces)
    return simulate(replace(settings, rules=rules), SmallWorkload(), recorder)


def test_a_paced_run_takes_fewer_seconds_a_step_and_trains_as_many_long_prompts() -> None:
    plain, paced = _simulated(paces=False), _simulated(paces=True)
    assert paced.step_s < 0.95 * plain.step_s
    assert paced.trainer_idle_share < plain.trainer_idle_share
    assert paced.long_prompt_ratio == pytest.approx(1.0, abs=0.03)
    assert paced.num_staleness_exceeded == paced.num_kept_discarded == 0


def test_a_synchronous_run_keeps_the_order_of_issue() -> None:
    plain, paced = (_simulated(paces=paces, max_staleness=0) for paces in (False, True))
    assert plain == paced
