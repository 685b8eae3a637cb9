"""The time to fill a batch is that of a trainer that takes no time, in every mode."""

from __future__ import annotations

from dataclasses import replace

from sluice.simulate.result import compare, simulate, simulate_fill_times
from sluice.simulate.settings import TrainerSettings
from tests.unit.simulate.simulations import SmallWorkload, small


def test_the_time_to_fill_does_not_depend_on_the_trainer_and_the_time_of_a_step_does() -> None:
    quick = small(trainer=TrainerSettings(train_s=1.0))
    slow = small(trainer=TrainerSettings(train_s=100.0))
    fills = [simulate_fill_times(each, SmallWorkload()).step_s for each in (quick, slow)]
    assert fills[0] == fills[1]
    assert simulate(slow, SmallWorkload()).step_s > 100.0 > 10 * fills[0]


def test_a_comparison_and_one_simulation_mean_the_same_by_the_time_to_fill() -> None:
    fill = simulate_fill_times(small(), SmallWorkload())
    stream = next(c for c in compare(small(), SmallWorkload) if c.result.strategy == "stream")
    assert stream.fill == fill


def test_the_discarded_share_is_of_all_groups_that_were_kept() -> None:
    settings = small(num_steps=20)
    rounds = replace(settings.rules, strategy=type(settings.rules.strategy).ROUNDS, max_staleness=0)
    result = simulate(replace(settings, rules=rounds), SmallWorkload())
    discarded, trained = result.num_kept_discarded, 20 * 6
    assert result.discarded_share == discarded / (discarded + trained) > 0.0
    assert simulate(settings, SmallWorkload()).discarded_share == 0.0
