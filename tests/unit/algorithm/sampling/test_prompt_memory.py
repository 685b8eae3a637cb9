"""What is remembered of a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.sampling.attempt import PromptHistory, RememberedAttempt, update_history


def attempt(history: PromptHistory | None, right: int, scored: int, version: int) -> PromptHistory:
    return update_history(history, RememberedAttempt(right, scored, 100.0, version))


def test_a_first_attempt_is_remembered_as_it_was() -> None:
    assert attempt(None, 3, 16, 7) == PromptHistory(3.0, 13.0, 100.0, 7, 1)


def test_attempts_of_the_same_version_add_up() -> None:
    assert attempt(attempt(None, 3, 16, 7), 1, 4, 7) == PromptHistory(4.0, 16.0, 100.0, 7, 2)


def test_what_is_old_counts_less() -> None:
    aged = PromptHistory(8.0, 8.0, 50.0, 0, 1).discounted(140)
    assert aged.num_right == pytest.approx(4.0, rel=0.02)
    assert aged.mean_tokens == 50.0


def test_attempts_of_a_later_policy_count_less_for_a_run_that_restarts() -> None:
    restarted = PromptHistory(8.0, 8.0, 50.0, 140, 1).discounted(0)
    assert restarted.num_right == pytest.approx(4.0, rel=0.02)
    assert restarted.num_wrong == pytest.approx(4.0, rel=0.02)
    assert restarted.version == 0


def test_lengths_are_averaged_by_samples() -> None:
    before = PromptHistory(4.0, 4.0, 100.0, 5, 1)
    after = update_history(before, RememberedAttempt(0, 8, 200.0, 5))
    assert after.mean_tokens == pytest.approx(150.0)


def test_an_attempt_without_a_graded_sample_leaves_the_counts() -> None:
    assert attempt(PromptHistory(4.0, 4.0, 100.0, 5, 1), 0, 0, 5).num_right == 4.0


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 50)), max_size=20))
def test_counts_are_never_more_than_the_samples_seen(attempts: list[tuple[int, int]]) -> None:
    history: PromptHistory | None = None
    version = 0
    for right, later in attempts:
        version += later
        history = attempt(history, right, 16, version)
    if history is not None:
        assert history.num_right + history.num_wrong <= 16 * len(attempts) + 1e-9
        assert history.num_attempts == len(attempts)
