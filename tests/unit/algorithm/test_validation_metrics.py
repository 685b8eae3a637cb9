"""Names and grouping of held-out metrics."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.validation_metrics import (
    ValidationPrompt,
    bootstrap_indices,
    bootstrap_sizes,
    majority_responses,
    prompt_metrics,
    validation_metrics,
)
from sluice.types import Scored


def prompt(
    *accuracies: float, source: str = "math_dapo", predictions: str | None = None
) -> ValidationPrompt:
    scores = tuple(
        Scored(2 * acc - 1, 2 * acc - 1, {"acc": acc}, predictions[i] if predictions else None)
        for i, acc in enumerate(accuracies)
    )
    return ValidationPrompt(source, scores)


def voting(source: str, *predictions: str | None) -> ValidationPrompt:
    scores = (
        Scored(float(i), float(i), {"acc": float(i)}, one) for i, one in enumerate(predictions)
    )
    return ValidationPrompt(source, tuple(scores))


def test_one_response_a_prompt_gives_its_mean_only() -> None:
    found = validation_metrics([prompt(1.0), prompt(0.0), prompt(0.0), prompt(0.0)])
    assert found == {
        "val-core/math_dapo/acc/mean@1": 0.25,
        "val-aux/math_dapo/reward/mean@1": -0.5,
        "val-aux/math_dapo/score/mean@1": -0.5,
    }


def test_core_metrics_are_mean_best_and_maj_of_accuracy_at_the_largest_n() -> None:
    found = validation_metrics([prompt(1, 0, 0, 0, predictions="abbc")])
    core = {name.removeprefix("val-core/math_dapo/") for name in found if "val-core" in name}
    assert core == {
        "acc/mean@4",
        "acc/best@4/mean",
        "acc/best@4/std",
        "acc/maj@4/mean",
        "acc/maj@4/std",
    }
    assert {"val-aux/math_dapo/acc/std@4", "val-aux/math_dapo/acc/worst@4/mean"} <= set(found)
    assert "val-aux/math_dapo/acc/best@2/mean" in found


def test_reward_is_the_core_variable_where_there_is_no_accuracy() -> None:
    scored = Scored(1.0, 0.5, {"f1": 0.7})
    found = validation_metrics([ValidationPrompt("qa", (scored,))])
    assert found["val-core/qa/reward/mean@1"] == 0.5
    assert found["val-aux/qa/score/mean@1"] == 1.0
    assert found["val-aux/qa/f1/mean@1"] == 0.7


def test_sources_are_averaged_apart() -> None:
    found = validation_metrics([prompt(1.0, source="a"), prompt(0.0, source="b")])
    assert found["val-core/a/acc/mean@1"] == 1.0
    assert found["val-core/b/acc/mean@1"] == 0.0


def test_a_response_without_a_prediction_is_a_vote_of_its_own() -> None:
    found = validation_metrics([voting("s", "a", None, None), voting("s", None, None, None)])
    lettered = validation_metrics([voting("s", "a", "b", "b"), voting("s", "b", "b", "b")])
    assert any("maj@3" in name for name in found)
    assert found == lettered


def test_a_source_without_any_prediction_has_no_majority() -> None:
    found = validation_metrics([voting("with", "a", None), voting("without", None, None)])
    assert {name.split("/")[1] for name in found if "maj" in name} == {"with"}


def test_a_metric_some_responses_lack_is_left_out() -> None:
    scores = (Scored(1.0, 1.0, {"acc": 1.0, "extra": 1.0}), Scored(0.0, 0.0, {"acc": 0.0}))
    assert not any("extra" in name for name in validation_metrics([ValidationPrompt("s", scores)]))


@pytest.mark.parametrize(
    ("num", "sizes"),
    [(2, (2,)), (3, (2, 3)), (4, (2, 4)), (12, (2, 4, 8, 12)), (16, (2, 4, 8, 16))],
)
def test_draws_are_of_powers_of_two_and_all(num: int, sizes: tuple[int, ...]) -> None:
    assert bootstrap_sizes(num) == sizes


def test_ties_go_to_the_prediction_sampled_first_and_its_first_member() -> None:
    draws = np.array([[2, 1, 0, 3], [0, 1, 2, 3], [3, 1, 1, 0]])
    assert majority_responses(["a", "b", "b", "a"], draws).tolist() == [2, 0, 3]


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_the_majority_is_what_counting_each_draw_by_hand_gives(predictions: list[str]) -> None:
    draws = bootstrap_indices(len(predictions), 4)[:50]
    expected = []
    for draw in draws:
        votes = [predictions[i] for i in draw]
        winner = max(dict.fromkeys(votes), key=votes.count)
        expected.append(draw[votes.index(winner)])
    assert majority_responses(predictions, draws).tolist() == expected


def test_a_vote_takes_memory_for_its_responses_not_for_their_pairs() -> None:
    draws = bootstrap_indices(256, 256)
    tracemalloc.start()
    try:
        majority_responses([str(number) for number in range(256)], draws)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * draws.nbytes  # 32 times as much for a table of pairs, in bytes


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9))
def test_worst_mean_and_best_are_in_order(accuracies: list[float]) -> None:
    found = prompt_metrics(np.array(accuracies), None)
    num = len(accuracies)
    assert found[f"worst@{num}/mean"] <= found[f"mean@{num}"] + 0.1
    assert found[f"best@{num}/mean"] >= found[f"mean@{num}"] - 0.1
    assert found[f"best@{num}/mean"] >= found["best@2/mean"] - 0.1
