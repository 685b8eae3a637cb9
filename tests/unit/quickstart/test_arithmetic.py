"""The arithmetic tasks: problems, worked answers and their files."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sluice.errors import ConfigError
from sluice.quickstart.arithmetic import (
    ANSWER_REQUEST,
    TASKS,
    ArithmeticProblem,
    Task,
    Wording,
    deal_problems,
    make_dialogues,
    split_problems,
    work_out,
    write_dataset,
)

QUICKSTART = TASKS["quickstart"]
STRETCH = TASKS["stretch"]
BOTH = pytest.mark.parametrize("task", [QUICKSTART, STRETCH], ids=lambda task: task.name)


@pytest.mark.parametrize(
    ("wording", "terms", "question"),
    [
        (Wording.FORMULA, (2, 6, 9), "What is 2 + 6 + 9?"),
        (Wording.COMMAND, (4, 7, 5), "Add 4 and 7 and 5. What is the sum?"),
        (Wording.STORY, (3, 2, 9), "Ann has 3 stamps and gets 2 then 9 more. How many now?"),
        (Wording.FORMULA, (9, -4, 5), "What is 9 - 4 + 5?"),
        (Wording.COMMAND, (9, -4, 5), "Start with 9, take away 4, add 5. What is the result?"),
        (Wording.STORY, (9, -4, 5), "Ann has 9 stamps, gives away 4, gets 5. How many now?"),
    ],
)
def test_each_wording_names_the_terms_in_order(
    wording: Wording, terms: tuple[int, ...], question: str
) -> None:
    assert ArithmeticProblem(wording, terms).question == question + ANSWER_REQUEST


@BOTH
def test_a_formula_evaluates_to_the_answer(task: Task) -> None:
    formulas = [
        problem
        for problem in split_problems(task, 3, 500, 20).train
        if problem.wording is Wording.FORMULA
    ]
    assert len(formulas) > 100
    for problem in formulas:
        found = re.fullmatch(
            r"What is ([0-9+\- ]+)\?", problem.question.removesuffix(ANSWER_REQUEST)
        )
        assert found is not None
        assert sum(int(term) for term in re.findall(r"-?\d+", found[1].replace(" ", ""))) == (
            problem.answer
        )


@BOTH
def test_terms_and_running_totals_keep_the_tasks_bounds(task: Task) -> None:
    problems = split_problems(task, 0, 2000, 50).train
    assert {len(p.terms) for p in problems} == set(range(task.min_terms, task.max_terms + 1))
    assert {n for p in problems for n in p.numbers} == set(range(task.smallest, task.largest + 1))
    assert all(sum(p.terms[:count]) >= 0 for p in problems for count in range(1, len(p.terms)))
    assert any(min(p.terms) < 0 for p in problems) == task.subtraction


@BOTH
def test_no_sequence_of_numbers_is_both_trained_and_held_out(task: Task) -> None:
    split = split_problems(task, 0, 8000, 256)
    held_out = {problem.numbers for problem in split.held_out}
    assert len(held_out) == len(split.held_out) == 256
    assert held_out.isdisjoint(problem.numbers for problem in split.train)


def test_every_problem_of_a_cell_is_dealt_before_one_repeats() -> None:
    split = split_problems(QUICKSTART, 0, 8000, 256)
    times = Counter((problem.wording, problem.terms) for problem in split.train)
    assert len(split.train) == 8000
    assert {n for (_, terms), n in times.items() if len(terms) > 3} == {1}
    for wording in Wording:
        short = [n for (w, terms), n in times.items() if w is wording and len(terms) == 3]
        assert max(short) - min(short) <= 1


def test_the_large_space_of_stretch_repeats_nothing() -> None:
    train = split_problems(STRETCH, 0, 8000, 256).train
    assert len({(problem.wording, problem.terms) for problem in train}) == 8000


def test_the_seed_decides_the_problems() -> None:
    assert split_problems(QUICKSTART, 1, 200, 20) == split_problems(QUICKSTART, 1, 200, 20)
    assert split_problems(QUICKSTART, 1, 200, 20) != split_problems(QUICKSTART, 2, 200, 20)


def test_more_held_out_problems_than_the_space_bears_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_held_out: 5000"):
        split_problems(QUICKSTART, 0, 100, 5000)


STEP = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)\.")


def problems_of(task: Task, count: int) -> tuple[ArithmeticProblem, ...]:
    return tuple(islice(deal_problems(random.Random(7), task, ()), count))


def test_a_right_answer_reads_as_one_step_per_term_and_the_result() -> None:
    answer = work_out(ArithmeticProblem(Wording.FORMULA, (2, 6, 9)), random.Random(0), 0.0)
    assert answer == "2 + 6 = 8. 8 + 9 = 17.\nAnswer: 17"


@BOTH
def test_without_slips_every_result_is_the_ground_truth(task: Task) -> None:
    for dialogue in make_dialogues(problems_of(task, 300), random.Random(0), 0.0):
        assert dialogue.answer.endswith(f"\nAnswer: {dialogue.problem.answer}")


@BOTH
def test_a_slip_is_carried_on_and_the_rest_is_calculated_rightly(task: Task) -> None:
    for dialogue in make_dialogues(problems_of(task, 500), random.Random(0), 0.3):
        total = dialogue.problem.terms[0]
        steps = STEP.findall(dialogue.answer)
        for (left, sign, number, result), term in zip(
            steps, dialogue.problem.terms[1:], strict=True
        ):
            assert int(left) == total
            assert int(sign + number) == term
            total = int(result)
            error = total - (int(left) + term)
            assert error in {0, 10}
        assert dialogue.answer.endswith(f"\nAnswer: {total}")


@BOTH
def test_the_share_of_wrong_steps_is_the_rate_asked_for(task: Task) -> None:
    steps = [
        int(result) - (int(left) + int(sign + number))
        for dialogue in make_dialogues(problems_of(task, 4000), random.Random(0), 0.35)
        for left, sign, number, result in STEP.findall(dialogue.answer)
    ]
    share = sum(error != 0 for error in steps) / len(steps)
    assert share == pytest.approx(0.35, abs=0.02)


def test_a_row_has_the_columns_of_dapo_math(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.parquet"
    problem = ArithmeticProblem(Wording.FORMULA, (2, 6, 9))
    write_dataset(path, (problem,), "train")
    assert pq.read_table(path).to_pylist() == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "17", "style": "rule"},
            "extra_info": {"index": 0, "split": "train", "num_terms": 3},
        }
    ]


def test_row_groups_are_small_enough_to_stream_and_rows_keep_their_order(tmp_path: Path) -> None:
    problems = split_problems(TASKS["quickstart"], 0, 2500, 10).train
    path = tmp_path / "train.parquet"
    write_dataset(path, problems, "train")
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    assert sizes == [1024, 1024, 452]
    rows = pq.read_table(path).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == list(range(2500))
    assert [row["reward_model"]["ground_truth"] for row in rows] == [
        str(p.answer) for p in problems
    ]
