"""Evaluations beside each other: the same prompts, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.errors import DataError
from sluice.evaluation.comparison import compare_benchmarks, read_evaluations
from tests.support.stored_evaluation import evaluation, graded, prompt, sample, store


def test_prompts_are_matched_by_what_they_are_and_not_by_their_position(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "a", [graded(0, 0.0), graded(1, 1.0)])
    moved = [graded(1, 1.0) | {"position": 0}, graded(0, 1.0) | {"position": 1}]
    second = evaluation(tmp_path / "b", moved)
    (found,) = compare_benchmarks(read_evaluations([first, second]))
    assert [one.means for one in found.prompts] == [(0.0, 1.0), (1.0, 1.0)]
    assert found.differences[1] is not None
    assert found.differences[1].value == 0.5


def test_a_difference_leaves_out_prompts_that_one_lacks(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "a", [graded(0, 0.0), graded(1, 1.0)])
    second = evaluation(tmp_path / "b", [graded(0, 1.0), graded(5, 0.0)])
    (found,) = compare_benchmarks(read_evaluations([first, second]))
    assert found.differences[0] is None
    assert found.differences[1] is not None
    assert (found.differences[1].value, found.differences[1].prompts) == (1.0, 1)
    assert {one.means for one in found.prompts} == {(0.0, 1.0), (1.0, None), (None, 0.0)}


def test_equal_prompts_in_one_benchmark_are_compared_one_by_one(tmp_path: Path) -> None:
    def twice(*accuracies: float) -> list[dict[str, object]]:
        same = {"prompt": [], "ground_truth": "4"}
        return [prompt(n, [sample(acc=a)], **same) for n, a in enumerate(accuracies)]

    folders = [evaluation(tmp_path / "a", twice(0, 1)), evaluation(tmp_path / "b", twice(0, 0))]
    (found,) = compare_benchmarks(read_evaluations(folders))
    assert [one.means for one in found.prompts] == [(1.0, 0.0), (0.0, 0.0)]


def test_means_of_an_evaluation_with_acc_beside_one_without_are_of_the_reward(
    tmp_path: Path,
) -> None:
    first = evaluation(tmp_path / "a", [graded(0, 0.25)])  # its reward is -0.5
    second = evaluation(tmp_path / "b", [prompt(0, [sample(reward=1.0, metrics={})])])
    (found,) = compare_benchmarks(read_evaluations([first, second]))
    assert found.variable == "reward"
    assert [one and one.mean and one.mean.value for one in found.results] == [-0.5, 1.0]
    assert found.differences[1] is not None
    assert found.differences[1].value == 1.5


def test_labels_are_as_long_as_it_takes_to_differ(tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / one / "eval", [graded(0, 1.0)]) for one in "ab"]
    assert [one.label for one in read_evaluations(folders)] == ["a/eval", "b/eval"]
    assert [one.label for one in read_evaluations(folders[:1])] == ["eval"]


def test_an_evaluation_that_runs_is_compared_as_far_as_it_got(tmp_path: Path) -> None:
    store(tmp_path / "a", [graded(0, 1.0, 0.0)])
    (one,) = read_evaluations([tmp_path / "a"])
    assert one.results is None
    assert one.samples_per_prompt == 2


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a", [graded(0, 1.0)])
    with pytest.raises(DataError, match="named 2 times; name each evaluation once"):
        read_evaluations([folder, tmp_path / "." / "a"])
