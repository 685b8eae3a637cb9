"""What holds in every simulation, whatever its settings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.sampling.admission import YieldFloor
from sluice.algorithm.sampling.rules import OnPolicyFill, StrategyName
from sluice.errors import BatchUnfillableError, ConfigError
from sluice.simulate.recorder import SimulationRecorder
from sluice.simulate.result import SimulationResult, simulate
from sluice.simulate.settings import (
    IDEAL_TRAINER,
    FleetSettings,
    SimulationSettings,
    TrainerSettings,
)
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from tests.unit.simulate.simulations import FLEET, SmallWorkload, small

CARRYING = [name for name in StrategyName if name is not StrategyName.ROUNDS]
FLEETS = st.builds(
    FleetSettings,
    num_replicas=st.integers(1, 5),
    slots=st.integers(1, 24),
    slack=st.sampled_from([1.0, 1.5, 3.0]),
    base_step_s=st.just(0.01),
    per_sequence_s=st.sampled_from([0.0, 0.001]),
    grading_s=st.sampled_from([0.0, 1.0]),
)
TRAINERS = st.sampled_from(
    [IDEAL_TRAINER, TrainerSettings(0.5, 0.2, 0.2, 0.1), TrainerSettings(20.0, 0.0, 1.0, 1.0)]
)
SETTINGS = st.builds(
    small,
    strategy=st.sampled_from(list(StrategyName)),
    batch_size=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
    group_size=st.integers(2, 6),
    num_steps=st.integers(4, 10),
    on_stale=st.sampled_from(["wait", "drop"]),
    on_policy_fill=st.sampled_from(["exact", "expected"]),
    fleet=FLEETS,
    trainer=TRAINERS,
)


def unaccounted(result: SimulationResult) -> float:
    accounts = dict(result.accounts)
    return accounts.pop("generated") - sum(accounts.values())


@settings(max_examples=60, deadline=None)
@given(chosen=SETTINGS, seed=st.integers(0, 3))
def test_every_token_is_attributed_and_batches_are_full_within_the_staleness_bound(
    chosen: SimulationSettings, seed: int
) -> None:
    recorder = SimulationRecorder()
    result = simulate(chosen, SmallWorkload(seed), recorder)
    assert abs(unaccounted(result)) < 1e-6 * result.accounts["generated"]
    assert min(result.accounts.values()) >= 0.0
    assert result.num_staleness_exceeded == 0
    assert result.staleness_max <= chosen.rules.max_staleness
    assert set(recorder.num_trained) == {chosen.rules.train_batch_size}


@settings(max_examples=40, deadline=None)
@given(chosen=SETTINGS, seed=st.integers(0, 3))
def test_a_strategy_that_carries_over_discards_no_kept_group_while_it_waits(
    chosen: SimulationSettings, seed: int
) -> None:
    if chosen.rules.strategy is StrategyName.ROUNDS:
        return
    result = simulate(replace(chosen, on_stale="wait"), SmallWorkload(seed))
    assert result.num_kept_discarded == 0
    assert result.accounts["surplus"] == 0.0


@pytest.mark.parametrize("strategy", list(StrategyName))
def test_the_same_seed_gives_the_same_figures(strategy: StrategyName) -> None:
    chosen = small(strategy, max_staleness=2)
    assert simulate(chosen, SmallWorkload(1)) == simulate(chosen, SmallWorkload(1))
    assert simulate(chosen, SmallWorkload(1)) != simulate(chosen, SmallWorkload(2))


def test_rounds_throw_away_what_a_batch_leaves_of_its_waves_and_nothing_else() -> None:
    recorder = SimulationRecorder()
    result = simulate(small(StrategyName.ROUNDS, num_steps=20), SmallWorkload(), recorder)
    num_mixed = sum(issue.is_mixed for issue in recorder.issues.values())
    assert result.num_kept_discarded == num_mixed - 20 * 6 > 0
    assert result.accounts["stale"] == 0.0
    assert len(recorder.issues) % 6 == 0  # whole waves


@pytest.mark.parametrize("strategy", CARRYING)
def test_at_staleness_0_the_trained_prompts_do_not_depend_on_the_fleet(
    strategy: StrategyName,
) -> None:
    trained = []
    for num_replicas in (1, 5):
        recorder = SimulationRecorder()
        fleet = replace(FLEET, num_replicas=num_replicas)
        simulate(small(strategy, max_staleness=0, fleet=fleet), SmallWorkload(), recorder)
        trained.append({p for p, issue in recorder.issues.items() if issue.is_trained})
    assert trained[0] == trained[1]


def test_a_batch_filled_on_average_is_full_sooner_than_an_exact_one_and_than_verls_waves() -> None:
    def mean_fill(strategy: StrategyName, on_policy_fill: OnPolicyFill = "exact") -> float:
        chosen = small(
            strategy,
            max_staleness=0,
            batch_size=16,
            num_steps=60,
            trainer=IDEAL_TRAINER,
            on_policy_fill=on_policy_fill,
        )
        return simulate(chosen, SmallWorkload()).step_s

    expected = mean_fill(StrategyName.STREAM, "expected")
    assert expected < 0.8 * mean_fill(StrategyName.STREAM)
    assert expected < 0.8 * mean_fill(StrategyName.ROUNDS)


def test_of_two_groups_kept_at_the_same_instant_the_one_without_a_place_is_preempted() -> None:
    chosen = small(max_staleness=0, batch_size=4, num_steps=60, on_policy_fill="expected")
    assert simulate(chosen, SmallWorkload(1)).num_kept_discarded == 0


def test_prompts_whose_answers_are_long_are_preempted_and_trained_all_the_same() -> None:
    recorder = SimulationRecorder()
    chosen = small(max_staleness=0, batch_size=16, num_steps=90, on_policy_fill="expected")
    result = simulate(chosen, SmallWorkload(), recorder)
    assert recorder.num_restarted > 90
    assert result.accounts["preempted"] > 0.0 == result.accounts["stale"]
    early = [issue for issue in recorder.issues.values() if issue.version < 70]
    trained = [sum(i.is_trained for i in early if i.is_long is long) for long in (True, False)]
    mixed = [sum(i.is_mixed for i in early if i.is_long is long) for long in (True, False)]
    assert trained == mixed  # whatever was mixed has been trained, be it long


@settings(max_examples=20, deadline=None)
@given(strategy=st.sampled_from([StrategyName.ROUNDS, StrategyName.STREAM]), seed=st.integers(0, 5))
def test_replicas_twice_as_fast_halve_the_time_of_a_synchronous_batch(
    strategy: StrategyName, seed: int
) -> None:
    slow = small(strategy, max_staleness=0, trainer=IDEAL_TRAINER)
    fast = replace(
        slow,
        fleet=replace(
            FLEET,
            base_step_s=FLEET.base_step_s / 2,
            per_sequence_s=FLEET.per_sequence_s / 2,
        ),
    )
    slow_s = simulate(slow, SmallWorkload(seed)).step_s
    assert simulate(fast, SmallWorkload(seed)).step_s == pytest.approx(slow_s / 2)


def test_more_replicas_do_not_slow_a_batch_as_long_as_their_swaps_fit_a_publication() -> None:
    trainer = TrainerSettings(2.0, publish_s=0.5, stall_s=0.05)
    times = [
        simulate(
            small(
                max_staleness=2,
                num_steps=40,
                fleet=replace(FLEET, num_replicas=number),
                trainer=trainer,
            ),
            SmallWorkload(),
        ).step_s
        for number in (1, 2, 4, 8)
    ]
    assert all(later <= earlier * 1.02 for earlier, later in pairwise(times))


def test_a_staleness_bound_lets_generation_and_training_overlap() -> None:
    trainer = TrainerSettings(10.0, 0.0, 0.0, 0.0)
    steps = [
        simulate(small(max_staleness=bound, trainer=trainer), SmallWorkload()).step_s
        for bound in (0, 2)
    ]
    assert steps[0] > 12.0
    assert steps[1] < 11.0


def test_drawing_less_ahead_trains_fresher_samples_and_still_overlaps() -> None:
    settings = small(batch_size=12, num_steps=60)
    all_of_it, some = (
        simulate(
            replace(settings, rules=replace(settings.rules, ahead_share=share)), SmallWorkload()
        )
        for share in (1.0, 0.25)
    )
    synchronous = simulate(small(batch_size=12, num_steps=60, max_staleness=0), SmallWorkload())
    assert some.staleness_mean < 0.75 * all_of_it.staleness_mean
    assert some.step_s < 0.75 * synchronous.step_s
    assert some.num_kept_discarded == some.num_restarted == some.num_staleness_exceeded == 0


def test_dropping_loses_long_prompts_and_waiting_does_not() -> None:
    fast = replace(FLEET, num_replicas=8)
    kept = [
        simulate(
            small(max_staleness=1, num_steps=80, on_stale=rule, trainer=IDEAL_TRAINER, fleet=fast),
            SmallWorkload(),
        ).long_prompt_ratio
        for rule in ("wait", "drop")
    ]
    assert kept[0] >= 0.97
    assert kept[1] < kept[0]


class Hopeless(SmallWorkload):
    """Nothing is ever right."""

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        return SimulatedSamples([5] * num_samples, [False] * num_samples)


@pytest.mark.parametrize("strategy", list(StrategyName))
def test_a_hopeless_workload_ends_with_the_services_error(strategy: StrategyName) -> None:
    with pytest.raises(
        BatchUnfillableError, match=r"only 0.00% of the last 2000 groups.*simulated"
    ):
        simulate(small(strategy), Hopeless())


class Rare(SmallWorkload):
    """One group of 20 is mixed."""

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        are_right = [position % 20 == 0] + [False] * (num_samples - 1)
        return SimulatedSamples([5] * num_samples, are_right)


@pytest.mark.parametrize("strategy", [StrategyName.ROUNDS, StrategyName.STREAM])
def test_the_simulation_gives_up_at_the_services_yield_floor(strategy: StrategyName) -> None:
    chosen = small(strategy)
    simulate(replace(chosen, yield_floor=YieldFloor(0.04, 100)), Rare())
    with pytest.raises(BatchUnfillableError, match=r"only 5.00% of the last 100.*= 0.06"):
        simulate(replace(chosen, yield_floor=YieldFloor(0.06, 100)), Rare())


def test_a_simulation_without_a_floor_ends_when_nothing_at_all_is_kept() -> None:
    chosen = replace(small(StrategyName.STREAM), yield_floor=YieldFloor(0.0))
    simulate(chosen, Rare())
    with pytest.raises(BatchUnfillableError, match=r"only 0.00% of the last .*--workload"):
        simulate(chosen, Hopeless())


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="capacity for a sequence"):
        FleetSettings(num_replicas=0)
    with pytest.raises(ConfigError, match="none below 0"):
        FleetSettings(base_step_s=-1.0)
    with pytest.raises(ConfigError, match="a stall no longer than the publication"):
        TrainerSettings(1.0, 0.0, 1.0, 2.0)
    with pytest.raises(ConfigError, match="warm up"):
        small(num_steps=3, warmup_steps=2)


def _trainer_bound(max_staleness: int, *, overlaps: bool) -> float:
    """Return seconds of a step that trains for 20 s and publishes for 10 s."""
    trainer = TrainerSettings(20.0, publish_s=10.0, stall_s=0.1, overlaps=overlaps)
    chosen = small(max_staleness=max_staleness, num_steps=12, trainer=trainer)
    return simulate(chosen, SmallWorkload()).step_s


@pytest.mark.parametrize("max_staleness", [2, 3])
def test_a_step_does_not_wait_for_a_publication_that_staleness_leaves_places(
    max_staleness: int,
) -> None:
    assert _trainer_bound(max_staleness, overlaps=False) == pytest.approx(30.0)
    assert _trainer_bound(max_staleness, overlaps=True) == pytest.approx(20.0)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_publication_that_staleness_leaves_no_places_is_awaited(max_staleness: int) -> None:
    steps_s = [_trainer_bound(max_staleness, overlaps=overlaps) for overlaps in (False, True)]
    assert steps_s[0] == steps_s[1] >= 30.0


def test_a_publication_waits_for_the_one_before() -> None:
    trainer = TrainerSettings(1.0, publish_s=10.0, stall_s=0.1)
    recorder = SimulationRecorder()
    simulate(small(max_staleness=3, trainer=trainer), SmallWorkload(), recorder)
    for before, after in pairwise(recorder.steps):
        assert after.published_s >= before.published_s + 10.0 - 1e-9
