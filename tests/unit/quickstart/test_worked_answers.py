"""Worked answers reach their result step by step, and slip as often as asked."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from sluice.quickstart.arithmetic import (
    TASKS,
    Problem,
    Task,
    Wording,
    deal_problems,
    make_dialogues,
    work_out,
)

STEP = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)\.")
BOTH = pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)


def problems_of(task: Task, count: int) -> tuple[Problem, ...]:
    return tuple(islice(deal_problems(random.Random(7), task, ()), count))


def test_a_right_answer_reads_as_one_step_per_term_and_the_result() -> None:
    answer = work_out(Problem(Wording.FORMULA, (2, 6, 9)), random.Random(0), 0.0)
    assert answer.text == "2 + 6 = 8. 8 + 9 = 17.\nAnswer: 17"
    assert (answer.result, answer.num_steps, answer.num_wrong_steps) == (17, 2, 0)


@BOTH
def test_without_slips_every_result_is_the_ground_truth(task: Task) -> None:
    for dialogue in make_dialogues(problems_of(task, 300), random.Random(0), 0.0):
        assert dialogue.answer.result == dialogue.problem.answer


@BOTH
def test_a_slip_is_carried_on_and_the_rest_is_calculated_rightly(task: Task) -> None:
    for dialogue in make_dialogues(problems_of(task, 500), random.Random(0), 0.3):
        total = dialogue.problem.terms[0]
        num_wrong_steps = 0
        steps = STEP.findall(dialogue.answer.text)
        for (left, sign, number, result), term in zip(
            steps, dialogue.problem.terms[1:], strict=True
        ):
            assert int(left) == total
            assert int(sign + number) == term
            total = int(result)
            error = total - (int(left) + term)
            num_wrong_steps += error != 0
            assert error in {0, 10}
        assert num_wrong_steps == dialogue.answer.num_wrong_steps
        assert dialogue.answer.text.endswith(f"\nAnswer: {total}")


@BOTH
def test_the_share_of_wrong_steps_is_the_rate_asked_for(task: Task) -> None:
    answers = [d.answer for d in make_dialogues(problems_of(task, 4000), random.Random(0), 0.35)]
    share = sum(a.num_wrong_steps for a in answers) / sum(a.num_steps for a in answers)
    assert share == pytest.approx(0.35, abs=0.02)
