"""Worked answers, right or with slips: what the supervised warm start imitates.

A slip makes one step's result ten too large; later steps calculate rightly with the wrong number,
so the final answer is consistent with the steps above it. A model trained on such teachers knows
the format and the arithmetic and slips about as often as they do, which is what reinforcement
removes.

Ten too large, because that is one decision at one digit, made of nothing a small model confuses by
itself: off-by-one slips blend with its own inexact arithmetic and take several times as many
samples to unlearn. Always upwards, because then two slips never cancel and no wrong working is
rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sluice.quickstart.problems import Problem

SLIP = 10


@dataclass(frozen=True, slots=True)
class WorkedAnswer:
    """The assistant's message, the result it ends with and how many of its steps are wrong."""

    text: str
    result: int
    num_steps: int
    num_wrong_steps: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A problem with one answer to it."""

    problem: Problem
    answer: WorkedAnswer


def work_out(problem: Problem, rng: random.Random, wrong_step_rate: float) -> WorkedAnswer:
    """One step per term after the first, then a line ``Answer: N``.

    Each step is wrong with probability `wrong_step_rate`, independently.
    """
    total = problem.terms[0]
    steps: list[str] = []
    num_wrong_steps = 0
    for term in problem.terms[1:]:
        result = total + term
        if rng.random() < wrong_step_rate:
            result += SLIP
            num_wrong_steps += 1
        steps.append(f"{total} {'-' if term < 0 else '+'} {abs(term)} = {result}.")
        total = result
    text = f"{' '.join(steps)}\nAnswer: {total}"
    return WorkedAnswer(text, total, len(steps), num_wrong_steps)


def make_dialogues(
    problems: Iterable[Problem], rng: random.Random, wrong_step_rate: float
) -> Iterator[Dialogue]:
    """One worked answer for each problem, in order."""
    for problem in problems:
        yield Dialogue(problem, work_out(problem, rng, wrong_step_rate))
