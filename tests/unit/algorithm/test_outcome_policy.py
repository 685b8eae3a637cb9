"""What is done about samples without a score."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.groups.filter import (
    FINAL_ACTIONS,
    STRIKING_KINDS,
    OutcomeAction,
    OutcomePolicy,
    OutcomeRule,
    first_strike,
    is_quarantined,
)
from sluice.types import Failed, FailureKind, Outcome, Scored

RIGHT = Scored(1.0, 1.0, {"acc": 1.0})
SCORE_AGAIN, GENERATE_AGAIN = OutcomeAction.SCORE_AGAIN, OutcomeAction.GENERATE_AGAIN
LEAVE, DROP = OutcomeAction.LEAVE_OUT, OutcomeAction.DROP_GROUP

rules = st.builds(
    OutcomeRule,
    st.sampled_from(list(OutcomeAction)),
    st.integers(1, 6),
    st.sampled_from(sorted(FINAL_ACTIONS)),
)
RESPONDED = {FailureKind.UNSCORABLE, FailureKind.SCORER_TIMEOUT, FailureKind.SCORER_CRASH}
kinds = st.sampled_from(sorted(RESPONDED))
policies = st.dictionaries(kinds, rules).map(OutcomePolicy)
outcomes_of = st.one_of(
    st.just(RIGHT), st.sampled_from(list(FailureKind)).map(lambda kind: Failed(kind, "why"))
)


def failed(kind: FailureKind) -> Failed:
    return Failed(kind, "why")


@given(rule=rules)
def test_every_rule_ends_after_its_attempts(rule: OutcomeRule) -> None:
    taken = [rule.action_after(attempts) for attempts in range(1, rule.max_attempts + 3)]
    assert taken[rule.max_attempts - 1 :] == [rule.final] * 3
    assert set(taken[: rule.max_attempts - 1]) <= {rule.action}
    assert rule.final in FINAL_ACTIONS


@given(policy=policies, outcomes=st.lists(outcomes_of, max_size=8), attempts=st.integers(1, 8))
def test_a_scored_sample_is_never_tried_again_and_no_sample_in_two_ways(
    policy: OutcomePolicy, outcomes: list[Outcome], attempts: int
) -> None:
    scored_again = set(policy.indexes_to_repeat(outcomes, attempts, SCORE_AGAIN))
    regenerated = set(policy.indexes_to_repeat(outcomes, attempts, GENERATE_AGAIN))
    assert not scored_again & regenerated
    for place in scored_again | regenerated:
        outcome = outcomes[place]
        assert isinstance(outcome, Failed)
        assert outcome.kind in RESPONDED


def test_a_sample_is_tried_as_often_as_its_rule_says() -> None:
    policy = OutcomePolicy({FailureKind.SCORER_CRASH: OutcomeRule(SCORE_AGAIN, 3)})
    outcomes = (RIGHT, failed(FailureKind.SCORER_CRASH), failed(FailureKind.UNSCORABLE))
    tried = [policy.indexes_to_repeat(outcomes, attempts, SCORE_AGAIN) for attempts in (1, 2, 3, 4)]
    assert tried == [(1,), (1,), (), ()]


def test_kinds_without_a_rule_are_left_out() -> None:
    outcomes = tuple(failed(kind) for kind in FailureKind)
    assert OutcomePolicy().indexes_to_repeat(outcomes, 1, SCORE_AGAIN) == ()
    assert OutcomePolicy().indexes_to_repeat(outcomes, 1, GENERATE_AGAIN) == ()
    assert OutcomePolicy().group_failure(outcomes) is None


@pytest.mark.parametrize("rule", [OutcomeRule(DROP), OutcomeRule(GENERATE_AGAIN, 2, DROP)])
def test_a_group_is_dropped_for_a_kind_that_costs_it(rule: OutcomeRule) -> None:
    policy = OutcomePolicy({FailureKind.UNSCORABLE: rule})
    decisive = failed(FailureKind.UNSCORABLE)
    assert policy.group_failure((RIGHT, failed(FailureKind.ABORTED), decisive)) is decisive
    assert policy.group_failure((RIGHT, failed(FailureKind.ABORTED))) is None


def test_only_failures_that_cost_others_count_against_a_prompt() -> None:
    harmless = [failed(kind) for kind in FailureKind if kind not in STRIKING_KINDS]
    assert first_strike((RIGHT, *harmless)) is None
    crash = failed(FailureKind.SCORER_CRASH)
    assert first_strike((RIGHT, *harmless, crash)) is crash


@pytest.mark.parametrize(
    ("strikes", "most", "expected"), [(2, 3, False), (3, 3, True), (9, 3, True), (9, None, False)]
)
def test_a_prompt_is_quarantined_at_the_bound(
    strikes: int, most: int | None, expected: bool
) -> None:
    assert is_quarantined(strikes, most) is expected
