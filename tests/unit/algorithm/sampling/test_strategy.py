"""Strategies at work, on a population with known pass rates."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest

from sluice.algorithm.sampling.attempt import Attempt, PromptHistory, update_history
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.rules import SamplingRules, StrategyName
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy

N = 16
RULES = SamplingRules(
    StrategyName.STREAM, 64, 1, N, gen_batch_size=128, max_num_gen_batches=3, seed=5
)


def strategy(name: StrategyName, **changes: object) -> SamplingStrategy:
    return SamplingStrategy(replace(RULES, strategy=name, **changes))  # type: ignore[arg-type]


def load(in_flight: int = 0, kept: int = 0, training: int = 0, capacity: int = 10_000) -> LoopLoad:
    return LoopLoad(in_flight, kept, training, capacity)


@dataclass
class Totals:
    sampled: int = 0
    kept: int = 0
    hard: int = 0

    @property
    def per_trained(self) -> float:
        return self.sampled / (N * self.kept)


class World:
    """Prompts of known pass rates, visited epoch after epoch."""

    def __init__(self, chosen: SamplingStrategy, seed: int = 0) -> None:
        self.strategy, self._generator = chosen, np.random.default_rng(seed)
        parts = self._generator.choice(3, p=[0.3, 0.35, 0.35], size=2048)
        beta = self._generator.beta
        self.rates = np.choose(
            parts, [beta(0.3, 6, 2048), beta(1.2, 1.2, 2048), beta(6, 0.3, 2048)]
        )
        self.memory: dict[str, PromptHistory] = {}
        self._sequence = 0

    def run(self, num_batches: int, warm_up: int) -> Totals:
        totals = Totals()
        for version in range(num_batches):
            kept = 0
            while kept < RULES.train_batch_size:
                found = self._attempt_one(version)
                kept += found.kept
                if version >= warm_up:
                    totals.sampled += found.sampled
                    totals.kept += found.kept
                    totals.hard += found.hard
            self.strategy.batch_formed()
            for key, seen in self.strategy.new_version():
                self.memory[key] = update_history(self.memory.get(key), seen)
        return totals

    def _attempt_one(self, version: int) -> Totals:
        prompt = self._sequence % self.rates.size
        self._sequence += 1
        key = str(prompt)
        attempt = self.strategy.attempt(key, self._sequence, self.memory.get(key), version)
        if not attempt.first_samples:
            self.strategy.note_skipped(attempt)
            return Totals()
        self.strategy.note_started(attempt)
        answers = self._generator.random(N) < self.rates[prompt]
        seen = answers[: attempt.first_samples]
        continued: Attempt | None = attempt
        if attempt.first_samples < N:
            continued = self.strategy.after_probes(
                attempt, num_right=int(seen.sum()), num_scored=seen.size, version=version
            )
            seen = answers if continued else seen
        kept = seen.size == N and 0 < seen.sum() < N
        self.strategy.note_ended(
            continued or attempt,
            num_right=int(seen.sum()),
            num_scored=seen.size,
            mean_tokens=100.0,
            is_kept=bool(kept),
            version=version,
            seconds=1.0,
        )
        return Totals(seen.size, int(kept), int(kept and self.rates[prompt] < 0.1))


@pytest.fixture(scope="module")
def plain() -> Totals:
    return World(strategy(StrategyName.STREAM)).run(120, 40)


@pytest.mark.parametrize(
    "name", [StrategyName.STAGED, StrategyName.MEMORY, StrategyName.STAGED_MEMORY]
)
def test_probes_and_memory_save_samples_and_keep_the_share_of_hard_prompts(
    name: StrategyName, plain: Totals
) -> None:
    found = World(strategy(name)).run(160, 40)
    assert found.per_trained < 0.97 * plain.per_trained
    assert found.hard / found.kept == pytest.approx(plain.hard / plain.kept, rel=0.1)


def test_without_the_guard_hard_prompts_are_lost(plain: Totals) -> None:
    unguarded = strategy(StrategyName.STAGED_MEMORY, coverage_guard=False)
    found = World(unguarded).run(50, 30)
    assert found.hard / found.kept < 0.8 * plain.hard / plain.kept


def test_mixed_probes_always_continue() -> None:
    chosen = strategy(StrategyName.STAGED)
    attempt = chosen.attempt("a", 0, None, 0)
    assert attempt.first_samples == RULES.probe_samples
    assert chosen.after_probes(attempt, num_right=1, num_scored=4, version=0) is attempt


def test_probes_that_could_not_be_graded_do_not_stop_a_group() -> None:
    chosen = strategy(StrategyName.STAGED)
    attempt = chosen.attempt("a", 0, None, 0)
    assert chosen.after_probes(attempt, num_right=0, num_scored=0, version=0) is attempt


def test_stream_draws_every_prompt_whole_whatever_its_history() -> None:
    history = PromptHistory(160.0, 0.0, 100.0, 0, 10)
    attempt = strategy(StrategyName.STREAM).attempt("a", 0, history, 0)
    assert attempt.first_samples == N
    assert attempt.history is None


def test_a_prompt_that_was_always_right_is_mostly_passed_by_but_explored_at_times() -> None:
    chosen = strategy(StrategyName.MEMORY)
    history = PromptHistory(64.0, 0.0, 100.0, 0, 4)
    attempts = [chosen.attempt(str(i), i, history, 0) for i in range(1000)]
    num_sampled = sum(attempt.first_samples > 0 for attempt in attempts)
    assert 60 <= num_sampled <= 140  # exploration 0.1
    assert all(attempt.probability == pytest.approx(0.1) for attempt in attempts)


def test_choices_depend_on_the_attempt_alone() -> None:
    history = PromptHistory(64.0, 0.0, 100.0, 0, 4)
    first, second = strategy(StrategyName.MEMORY), strategy(StrategyName.MEMORY)
    forward = [first.attempt(str(i), i, history, 0).first_samples for i in range(200)]
    backward = [second.attempt(str(i), i, history, 0).first_samples for i in reversed(range(200))]
    assert forward == backward[::-1]


def test_what_is_learnt_does_not_depend_on_which_group_ended_first() -> None:
    learnt = []
    for order in (1, -1):
        chosen = strategy(StrategyName.STAGED_MEMORY)
        attempts = [chosen.attempt(str(i), i, None, 0) for i in range(100)][::order]
        for attempt in attempts:
            chosen.note_ended(
                attempt,
                num_right=attempt.sequence % 17,
                num_scored=N,
                mean_tokens=10.0,
                is_kept=attempt.sequence % 17 not in {0, 16},
                version=0,
                seconds=1.0,
            )
        histories = chosen.new_version()
        learnt.append((histories, chosen.statistics()["sampling/price"]))
    assert learnt[0] == learnt[1]


def test_nothing_is_learnt_before_a_version_is_announced() -> None:
    chosen = strategy(StrategyName.STAGED)
    before = chosen.statistics()["sampling/price"]
    attempt = chosen.attempt("a", 0, None, 0)
    chosen.note_ended(
        attempt, num_right=0, num_scored=4, mean_tokens=1.0, is_kept=False, version=0, seconds=1.0
    )
    assert chosen.statistics()["sampling/price"] == before
    assert chosen.new_version() == []  # staged remembers no prompts
    assert chosen.statistics()["sampling/price"] != before


def test_rounds_waits_for_the_whole_wave_and_throws_the_surplus_away() -> None:
    chosen = strategy(StrategyName.ROUNDS, max_staleness=0)
    assert chosen.discards_surplus
    assert chosen.num_to_start(load()) == 128
    for i in range(128):
        chosen.note_started(chosen.attempt(str(i), i, None, 0))
    assert chosen.num_to_start(load(in_flight=1, kept=70)) == 0
    assert not chosen.may_form(1)
    assert chosen.may_form(0)


def test_stream_carries_surplus_over_and_forms_whenever_there_are_enough() -> None:
    chosen = strategy(StrategyName.STREAM)
    assert not chosen.discards_surplus
    assert chosen.may_form(5)


def test_no_more_groups_start_than_the_fleet_has_capacity_for() -> None:
    for name in StrategyName:
        chosen = strategy(name, max_staleness=0)
        assert chosen.num_to_start(load(capacity=3)) == 3
        assert chosen.num_to_start(load(capacity=0)) == 0


def test_a_group_sure_to_be_kept_takes_a_whole_place() -> None:
    chosen = strategy(StrategyName.STAGED)
    for sequence in range(400):
        attempt = chosen.attempt(str(sequence), sequence, None, 0)
        chosen.note_ended(
            attempt,
            num_right=0,
            num_scored=4,
            mean_tokens=1.0,
            is_kept=False,
            version=0,
            seconds=1.0,
        )
    unsure = chosen.num_to_start(LoopLoad(100, 0, 0, capacity=10_000))
    sure = chosen.num_to_start(LoopLoad(100, 0, 0, capacity=10_000, num_sure=100))
    assert sure < unsure
    assert chosen.num_to_start(LoopLoad(128, 0, 0, capacity=10_000, num_sure=128)) == 0


def test_a_prompt_known_to_be_in_between_is_sampled_without_probes() -> None:
    history = PromptHistory(8.0, 8.0, 100.0, 0, 1)
    attempt = strategy(StrategyName.STAGED_MEMORY).attempt("a", 0, history, 0)
    assert attempt.first_samples == N


@pytest.fixture(scope="module")
def after_wrong_samples() -> SamplingStrategy:
    """A strategy whose guard has seen enough hard groups to draw the hard side at w < 1."""
    chosen = strategy(StrategyName.STAGED_MEMORY)
    World(chosen).run(24, 0)
    return chosen


def test_a_group_that_passes_two_choices_counts_with_the_probability_of_both(
    after_wrong_samples: SamplingStrategy,
) -> None:
    chosen = deepcopy(after_wrong_samples)
    factor = chosen.statistics()["sampling/draw_probability_hard"]
    history = PromptHistory(1.0, 16.0, 100.0, 40, 1)
    attempts = [chosen.attempt(str(i), i, history, 40) for i in range(400)]
    sampled = [
        replace(attempt, first_samples=RULES.probe_samples, probability=0.5) for attempt in attempts
    ]
    passed = [
        continued
        for attempt in sampled
        if (continued := chosen.after_probes(attempt, num_right=0, num_scored=4, version=40))
    ]
    assert {attempt.side for attempt in passed} == {Side.HARD}
    # With w as it is the guard expects what is really sampled.
    assert all(factor * v.value == pytest.approx(v.probability) for v in passed)
    assert all(0.1 < v.probability < 0.5 for v in passed)


def test_known_prompts_less_likely_hard_are_thinned_and_others_are_not(
    after_wrong_samples: SamplingStrategy,
) -> None:
    chosen = deepcopy(after_wrong_samples)
    middling, hard = PromptHistory(8.0, 8.0, 1.0, 40, 1), PromptHistory(2.0, 30.0, 1.0, 40, 2)
    plain = [chosen.attempt(str(i), i, middling, 40) for i in range(1000)]
    num_sampled = sum(attempt.first_samples > 0 for attempt in plain)
    probability = chosen.statistics()["sampling/draw_probability_plain"]
    assert probability < 1.0
    assert num_sampled == pytest.approx(1000 * probability, abs=60)
    assert {attempt.side for attempt in plain} == {Side.PLAIN}
    assert chosen.attempt("h", 0, hard, 40).side is not Side.PLAIN
    assert all(chosen.attempt(str(i), i, None, 40).first_samples for i in range(100))
    before = chosen.statistics()["sampling/skipped_plain"]
    chosen.note_skipped(next(attempt for attempt in plain if not attempt.first_samples))
    assert chosen.statistics()["sampling/skipped_plain"] == before + 1


def test_a_share_of_the_batches_ahead_is_counted_in_groups() -> None:
    assert replace(RULES, ahead_share=0.25).num_ahead == 16
    assert replace(RULES, max_staleness=4, ahead_share=0.25).num_ahead == 64
    assert replace(RULES, train_batch_size=100, ahead_share=0.28).num_ahead == 28
    assert replace(RULES, train_batch_size=1, ahead_share=0.1).num_ahead == 1
    assert replace(RULES, ahead_share=1.0).num_ahead is None
    assert replace(RULES, max_staleness=0, ahead_share=0.25).num_ahead is None


def test_a_strategy_starts_as_many_groups_as_are_wanted_ahead() -> None:
    few = strategy(StrategyName.STREAM, ahead_share=0.25)
    assert few.num_to_start(load()) == 64 + 16
    assert few.num_to_start(load(training=64, kept=16)) == 0
    assert strategy(StrategyName.STREAM, ahead_share=1.0).num_to_start(load()) == 128
