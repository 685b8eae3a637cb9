"""Simulated groups are kept or filtered as the reward service does it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.groups.filter import filter_scores
from sluice.algorithm.sampling.attempt import Attempt
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from sluice.types import Scored


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_simulated_group_ends_as_the_services_filter_says(are_right: list[bool]) -> None:
    scores = [Scored(float(right), float(right), {"acc": float(right)}) for right in are_right]
    sampled = SimulatedSamples([1] * len(are_right), are_right)
    assert sampled.end(len(are_right)) is filter_scores(scores, metric="acc")
    assert sampled.is_mixed == (filter_scores(scores, metric="acc") is None)


def test_a_lone_first_sample_does_not_make_a_group_sure() -> None:
    prompt, attempt = SimulatedPrompt("a", 0.5, is_long=False, number=0), Attempt("a", 0, None, 1)
    group = SimulatedGroup(0, prompt, 0, attempt, SimulatedSamples([1, 1, 1], [True, True, False]))
    surely = []
    for group.num_asked in (1, 2, 3):
        surely.append(group.is_sure)
    assert surely == [False, False, True]
