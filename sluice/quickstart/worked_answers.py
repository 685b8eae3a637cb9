"""Worked answers, right or with slips: what the supervised warm start imitates.

A slip makes one step's result wrong; later steps calculate rightly with the wrong number, so the
final answer is consistent with the steps above it. A model trained on such teachers knows the
format and the arithmetic and slips about as often as they do, which is what reinforcement removes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sluice.quickstart.problems import Problem

SLIPS = (-10, -2, -1, 1, 2, 10)


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

    Each step is wrong with probability `wrong_step_rate`, independently; a slip never makes a
    result negative.
    """
    total = problem.terms[0]
    steps: list[str] = []
    num_wrong_steps = 0
    for term in problem.terms[1:]:
        result = total + term
        if rng.random() < wrong_step_rate:
            result += rng.choice([slip for slip in SLIPS if result + slip >= 0] or [1])
            num_wrong_steps += 1
        steps.append(f"{total} {'-' if term < 0 else '+'} {abs(term)} = {result}.")
        total = result
    text = f"{' '.join(steps)}\nAnswer: {total}"
    return WorkedAnswer(text, total, len(steps), num_wrong_steps)


def make_dialogues(
    problems: tuple[Problem, ...], rng: random.Random, wrong_step_rate: float
) -> tuple[Dialogue, ...]:
    """One worked answer for each problem, in order."""
    return tuple(Dialogue(p, work_out(p, rng, wrong_step_rate)) for p in problems)
