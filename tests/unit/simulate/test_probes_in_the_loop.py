"""Groups with probes in the simulated loop: capacity, grades, and prompts that begin again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.algorithm.sampling.attempt import Attempt
from sluice.algorithm.sampling.rules import StrategyName
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.loop import SimulatedLoop
from sluice.simulate.recorder import SimulationRecorder, TokenCause
from sluice.simulate.settings import IDEAL_TRAINER, FleetSettings, SimulationSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from tests.unit.simulate.simulations import FLEET, SmallWorkload, small

ONE = FleetSettings(num_replicas=1, slots=64, slack=1.0, base_step_s=1.0, per_sequence_s=0.0)


class AllAlike:
    """Every group draws the same samples."""

    def __init__(self, tokens: list[int], are_right: list[bool]) -> None:
        self._sampled = SimulatedSamples(tokens, are_right)

    def prompt(self, position: int, version: int) -> SimulatedPrompt:
        return SimulatedPrompt(str(position), 0.5, is_long=False, number=position)

    def samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int, num_samples: int
    ) -> SimulatedSamples:
        return self._sampled


def one_group(tokens: list[int], are_right: list[bool], grading_s: float, probes: int) -> float:
    """Seconds until a single group is leased to a trainer that waits for it."""
    chosen = small(
        StrategyName.STAGED,
        batch_size=1,
        max_staleness=0,
        group_size=len(tokens),
        num_steps=2,
        warmup_steps=0,
        fleet=replace(ONE, grading_s=grading_s),
        trainer=IDEAL_TRAINER,
    )
    chosen = replace(chosen, rules=replace(chosen.rules, probe_samples=probes))
    recorder = SimulationRecorder()
    SimulatedLoop(chosen, AllAlike(tokens, are_right), recorder).run()
    assert recorder.tokens[TokenCause.TRAINED] == 2 * sum(tokens)
    return recorder.marks[0].time_s


@pytest.mark.parametrize(
    ("grading_s", "leased_s"),
    [
        # The second sample differs at 20: graded, the rest of 500 follows, is graded as well.
        (0.0, 20.0 + 500.0),
        (5.0, 20.0 + 5.0 + 500.0 + 5.0),
        # Graded after the last probe has ended and before its grade is there.
        (15.0, 20.0 + 15.0 + 500.0 + 15.0),
    ],
)
def test_the_rest_is_asked_for_when_two_grades_differ(grading_s: float, leased_s: float) -> None:
    tokens, are_right = [10, 20, 30, 500], [True, False, True, True]
    assert one_group(tokens, are_right, grading_s, probes=3) == pytest.approx(leased_s)


def test_a_rest_that_ends_before_the_probes_are_graded_is_awaited_with_its_grades() -> None:
    # Rest asked for at 20 + 15, over at 36; the last probe's grade comes at 45, the rest's at 51.
    tokens, are_right = [10, 20, 30, 1], [True, False, True, True]
    assert one_group(tokens, are_right, 15.0, probes=3) == pytest.approx(51.0)


class WatchedLoop(SimulatedLoop):
    """Notes the most groups under way, and the attempts that were given back."""

    def __init__(self, settings: SimulationSettings) -> None:
        self.most, self.given_back, self.sampled = 0, [], []
        super().__init__(settings, SmallWorkload(), SimulationRecorder())
        self._strategy.note_restarted = self._note_restart  # type: ignore[method-assign]
        self._strategy.note_started = self._note_start  # type: ignore[method-assign]

    def _note_start(self, attempt: Attempt) -> None:
        self.sampled.append(attempt)

    def _note_restart(self, attempt: Attempt) -> None:
        self.given_back.append(attempt)

    def _ask(self, group: SimulatedGroup, num_samples: int) -> None:
        self.most = max(self.most, len(self._in_flight))
        super()._ask(group, num_samples)


@pytest.mark.parametrize(("strategy", "most"), [(StrategyName.STREAM, 4), (StrategyName.STAGED, 8)])
def test_capacity_is_counted_in_first_samples(strategy: StrategyName, most: int) -> None:
    """16 sequences at once: 4 groups of 4 samples, or 8 of 2 probes."""
    fleet = replace(FLEET, num_replicas=1, slots=16, slack=1.0)
    loop = WatchedLoop(small(strategy, batch_size=20, max_staleness=1, fleet=fleet, num_steps=4))
    loop._admit()
    loop._fleet.announce(0)
    loop._admit()
    assert loop.most == most


def test_a_group_that_is_broken_off_gives_back_the_attempt_it_was_sampled_as() -> None:
    attempt = Attempt("a", 0, None, first_samples=2)
    prompt = SimulatedPrompt("a", 0.5, is_long=False, number=0)
    group = SimulatedGroup(0, prompt, 0, attempt, SimulatedSamples([1, 1], [True, False]))
    loop = WatchedLoop(small(StrategyName.STAGED))
    loop._in_flight[0] = group
    group.start_version = 0
    loop._batching.note_started(group)
    group.attempt = replace(attempt, probability=0.5)  # it continued by chance
    loop._cancel_without_slot([group])
    assert loop.given_back == [attempt]
