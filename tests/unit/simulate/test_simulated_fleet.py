"""Groups that are asked for in parts."""

from __future__ import annotations

from sluice.algorithm.sampling.attempt import Attempt
from sluice.simulate.fleet import EventQueue, SimulatedFleet
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.settings import FleetSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples


class World:
    """One replica that draws a token a second; the rest is asked for once samples differ."""

    def __init__(self, tokens: list[int], are_right: list[bool], first: int) -> None:
        self.events, self.asked_at, self.over_at = EventQueue(), -1.0, -1.0
        fleet = FleetSettings(num_replicas=1, slots=8, base_step_s=1.0, per_sequence_s=0.0)
        self.fleet = SimulatedFleet(
            fleet, self.events, lambda _: None, self._sample_ended, self._generated
        )
        self.fleet.announce(0)
        attempt = Attempt("a", 0, None, first)
        prompt = SimulatedPrompt("a", 0.5, is_long=False, number=0)
        self.group = SimulatedGroup(0, prompt, 0, attempt, SimulatedSamples(tokens, are_right))
        self.fleet.ask(self.group, first)
        while self.events.step():
            pass

    def _sample_ended(self, group: SimulatedGroup, is_right: bool) -> None:
        group.record_grade(is_right=is_right)
        rest = len(group.samples.tokens) - group.num_needed
        if rest and group.differs:
            self.asked_at = self.events.now
            self.fleet.ask(group, rest)

    def _generated(self, group: SimulatedGroup) -> None:
        self.over_at = self.events.now


def test_a_group_in_parts_is_over_when_the_last_sample_of_all_parts_is() -> None:
    world = World([10, 20, 1000, 30, 40], [True, False, True, True, True], first=3)
    assert world.asked_at == 20.0  # the second sample ends, and differs from the first
    assert world.over_at == 1000.0
    assert world.group.num_finished == 5
    assert world.group.parts == []
    assert world.fleet.num_free(0) == 12


def test_samples_that_agree_ask_for_nothing() -> None:
    world = World([10, 20, 30, 5], [True, True, True, False], first=3)
    assert world.asked_at == -1.0
    assert world.over_at == 30.0
    assert world.group.num_finished == 3
