"""Simulated groups are kept or filtered as the reward service does it, or as a record says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator.fit import FittedWorkload
from benchmarks.simulator.group_records import GroupRecord
from sluice.algorithm.groups.filter import filter_scores
from sluice.algorithm.sampling.attempt import Attempt
from sluice.errors import ConfigError
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.recorder import SimulationRecorder, TokenCause
from sluice.simulate.result import compare, simulate
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples
from sluice.types import PromptEnd, Scored
from tests.unit.simulate.simulations import SmallWorkload, recorded_group, small


def record(end: PromptEnd, right: int, scored: int = 4, prompt: str = "p") -> GroupRecord:
    return recorded_group(prompt_id=prompt, end=end.value, right=right, scored=scored)


def end_of(group: GroupRecord, num_samples: int = 4) -> PromptEnd | None:
    workload = FittedWorkload([group])
    return workload.samples(workload.prompt(0, 0), 0, 0, num_samples).end(num_samples)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_simulated_group_ends_as_the_services_filter_says(are_right: list[bool]) -> None:
    scores = [Scored(float(right), float(right), {"acc": float(right)}) for right in are_right]
    sampled = SimulatedSamples([1] * len(are_right), are_right)
    assert sampled.end(len(are_right)) is filter_scores(scores, metric="acc")
    assert sampled.is_mixed == (filter_scores(scores, metric="acc") is None)
    unfiltered = replace(sampled, is_filtered=False)
    assert unfiltered.end(len(are_right)) is filter_scores(scores, metric=None) is None
    assert unfiltered.is_mixed


def test_without_a_filter_no_group_is_thrown_away() -> None:
    recorder = SimulationRecorder()
    simulate(replace(small(), filters_groups=False), SmallWorkload(), recorder)
    assert set(recorder.tokens) == {TokenCause.TRAINED}
    assert all(issue.is_mixed for issue in recorder.issues.values())
    assert simulate(small(), SmallWorkload()).accounts["filtered_all_wrong"] > 0.0


@pytest.mark.parametrize("end", [PromptEnd.TRAINED, PromptEnd.DROPPED_STALE])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_a_group_that_the_record_says_was_kept_is_kept(end: PromptEnd, right: int) -> None:
    assert end_of(record(end, right)) is None


def test_a_kept_group_with_one_graded_sample_is_kept() -> None:
    assert end_of(record(PromptEnd.TRAINED, 0, scored=1)) is None


@pytest.mark.parametrize(
    ("end", "right"),
    [
        (PromptEnd.FILTERED_ALL_WRONG, 0),
        (PromptEnd.FILTERED_UNIFORM, 2),  # another metric than the grades
        (PromptEnd.FILTERED_ALL_RIGHT, 4),
    ],
)
def test_a_group_that_the_record_says_was_filtered_is_filtered(end: PromptEnd, right: int) -> None:
    assert end_of(record(end, right)) is end


def test_a_record_with_partial_credit_tells_that_grades_do_not_decide() -> None:
    assert record(PromptEnd.TRAINED, 2).is_decided_by_grades
    assert record(PromptEnd.FILTERED_ALL_WRONG, 0).is_decided_by_grades
    assert record(PromptEnd.DROPPED_FAILED, 0).is_decided_by_grades
    assert not record(PromptEnd.TRAINED, 0).is_decided_by_grades
    assert not record(PromptEnd.FILTERED_UNIFORM, 2).is_decided_by_grades


def test_strategies_that_choose_are_refused_without_a_filter_as_the_service_refuses_them() -> None:
    settings = replace(small(), filters_groups=False)
    said = r"strategy = rounds with algorithm.filter_groups.enable = false.*leave --compare out"
    with pytest.raises(ConfigError, match=said):
        compare(settings, SmallWorkload)


def test_a_lone_first_sample_does_not_make_a_group_sure() -> None:
    prompt, attempt = SimulatedPrompt("a", 0.5, is_long=False, number=0), Attempt("a", 0, None, 1)
    group = SimulatedGroup(0, prompt, 0, attempt, SimulatedSamples([1, 1, 1], [True, True, False]))
    surely = []
    for group.num_asked in (1, 2, 3):
        surely.append(group.is_sure)
    assert surely == [False, False, True]
