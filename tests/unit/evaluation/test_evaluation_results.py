"""results.json: the numbers of training's validation, and what is beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.errors import DataError
from sluice.evaluation.results import RESULTS_NAME, read_results
from sluice.types import Scored
from tests.support.stored_evaluation import evaluation, graded, prompt, sample


def test_metrics_are_exactly_those_of_a_validation_in_training(tmp_path: Path) -> None:
    accuracies = [(1.0, 0.0, 1 / 3, 0.7), (0.1, 0.2, 0.3, 1.0), (0.0, 0.0, 0.0, 1.0)]
    # Prompts finish in any order.
    stored = [graded(position, *accuracies[position]) for position in (2, 0, 1)]
    metrics = read_results(evaluation(tmp_path, stored)).benchmarks["math"].metrics
    prompts = [
        ValidationPrompt(
            "math",
            tuple(Scored(2 * a - 1, 2 * a - 1, {"acc": a}, "Answer: 4") for a in found),
        )
        for found in accuracies
    ]
    counts = {"val-aux/num_prompts": 3.0, "val-aux/num_failed_samples": 0.0}
    assert metrics == validation_metrics(prompts) | counts


def test_a_sample_without_a_grade_is_counted_and_left_out_of_the_means(tmp_path: Path) -> None:
    found = read_results(evaluation(tmp_path, [graded(0, 1.0, None), graded(1, None, None)]))
    numbers = found.benchmarks["math"]
    assert (numbers.prompts, numbers.failed_samples) == (2, 3)
    assert numbers.mean is not None
    assert (numbers.mean.value, numbers.mean.prompts) == (1.0, 1)
    assert 2 not in numbers.pass_at_k


def test_nothing_graded_has_no_mean(tmp_path: Path) -> None:
    numbers = read_results(evaluation(tmp_path, [graded(0, None)])).benchmarks["math"]
    assert numbers.mean is None
    assert numbers.pass_at_k == {}


def test_the_mean_is_of_the_reward_where_a_response_has_no_accuracy(tmp_path: Path) -> None:
    bare = sample(reward=0.5, metrics={"score": 0.5})
    numbers = read_results(evaluation(tmp_path, [prompt(0, [sample(), bare])])).benchmarks["math"]
    assert numbers.variable == "reward"
    assert numbers.mean is not None
    assert numbers.mean.value == 0.75


def test_lengths_and_cut_off_responses_are_counted(tmp_path: Path) -> None:
    stored = [prompt(0, [sample(tokens=10), sample(tokens=30, finish_reason="length")])]
    numbers = read_results(evaluation(tmp_path, stored)).benchmarks["math"]
    assert (numbers.response_tokens, numbers.cut_off) == (20.0, 0.5)


def test_the_file_is_json_with_estimates_by_k(tmp_path: Path) -> None:
    folder = evaluation(tmp_path, [graded(0, 1.0, 0.0), graded(1, 0.0, 0.0)])
    found = json.loads((folder / RESULTS_NAME).read_text())
    assert found["model"] == "models/a"
    assert found["benchmarks"]["math"]["pass_at_k"]["2"]["value"] == 0.5
    assert set(found["benchmarks"]["math"]["mean"]) == {"value", "standard_error", "prompts"}


def test_results_that_are_missing_or_damaged_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"results\.json: No such file .* evaluation that ended"):
        read_results(tmp_path)
    (tmp_path / RESULTS_NAME).write_text('{"model": 1}')
    with pytest.raises(DataError, match=r"results\.json: .*run the evaluation's command again"):
        read_results(tmp_path)
