"""Estimates over prompts: unbiased pass@k, standard errors, differences within prompts."""

from __future__ import annotations

from itertools import combinations
from statistics import stdev

import pytest

from sluice.evaluation.statistics import (
    PromptScores,
    estimate,
    paired_difference,
    pass_at_k,
    pass_estimates,
    pass_sizes,
)
from sluice.types import Scored


def scores(*accuracies: float) -> PromptScores:
    graded = tuple(Scored(one, one, {"acc": one}) for one in accuracies)
    return PromptScores(0, b"", "math", graded, 0, 0, 0, 0)


@pytest.mark.parametrize("correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    choices = list(combinations(samples, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_many_samples_is_finite() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_of_impossible_counts_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c} correct among {n}"):
        pass_at_k(n, c, k)


def test_k_are_powers_of_two_and_the_number_of_samples() -> None:
    assert pass_sizes(1) == (1,)
    assert pass_sizes(12) == (1, 2, 4, 8, 12)
    assert pass_sizes(16) == (1, 2, 4, 8, 16)


def test_a_prompt_with_fewer_graded_samples_than_k_has_no_pass_at_k() -> None:
    found = pass_estimates([scores(1, 0), scores(0)], 2)
    assert (found[1].value, found[1].prompts) == (0.25, 2)
    assert (found[2].value, found[2].prompts) == (1.0, 1)


def test_only_the_full_score_is_correct() -> None:
    assert pass_estimates([scores(0.9, 0.9)], 2)[2].value == 0.0


def test_the_standard_error_is_the_deviation_between_prompts_over_the_root_of_their_number() -> (
    None
):
    values = [0.0, 0.25, 1.0, 0.5]
    found = estimate(values)
    assert found is not None
    assert found.standard_error == pytest.approx(stdev(values) / 2)


def test_one_prompt_has_no_standard_error_and_none_no_estimate() -> None:
    found = estimate([0.5])
    assert found is not None
    assert found.standard_error is None
    assert estimate([]) is None


def test_a_difference_is_within_the_prompts_that_both_have() -> None:
    found = paired_difference({"a": 0.0, "b": 0.9, "c": 1.0}, {"b": 1.0, "a": 0.1, "d": 0.0})
    assert found is not None
    assert found.value == pytest.approx(0.1)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)
    assert found.prompts == 2
