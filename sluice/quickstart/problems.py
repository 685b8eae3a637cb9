"""Arithmetic problems of the quickstart job: what is asked, and which problems may be trained on.

Pure and seeded: the same task and seed give the same problems on every machine.

A problem's *cell* is its wording and its number of terms. The training split deals every cell
without repetition; only when a cell is exhausted does it start a second round. Size of the space
for ``quickstart`` (eight values a term, three wordings): 512 sequences of three terms, 4,096 of
four, 32,768 of five. 256 held-out problems take about 85, 85 and 85 of those sequences, so 8,000
training problems want about 889 problems of each cell where the three-term cells hold about 427:
three-term problems repeat two or three times, all others are unique. For ``stretch`` the smallest
cell holds over 4,096 sequences and nothing repeats.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from sluice.errors import ConfigError

ANSWER_REQUEST = " End with 'Answer: N'."


class Wording(StrEnum):
    """How the question is put into words."""

    FORMULA = "formula"
    COMMAND = "command"
    STORY = "story"


@dataclass(frozen=True, slots=True)
class Task:
    """A family of problems.

    Terms lie in ``[smallest, largest]``; a problem has ``min_terms`` to ``max_terms`` of them,
    each count equally likely. With `subtraction`, about half of the terms after the first are
    taken away, never below a total of 0. The token limits are those the job is run with: no
    prompt and no worked answer of the task's tokenizer is longer.
    """

    name: str
    min_terms: int
    max_terms: int
    smallest: int
    largest: int
    subtraction: bool
    max_prompt_tokens: int
    max_response_tokens: int
    overlong_buffer_tokens: int

    def num_sequences(self, num_terms: int) -> int:
        """How many sequences of numbers there are, signs not counted."""
        return int((self.largest - self.smallest + 1) ** num_terms)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="quickstart",
            min_terms=3,
            max_terms=5,
            smallest=2,
            largest=9,
            subtraction=False,
            max_prompt_tokens=48,
            max_response_tokens=56,
            overlong_buffer_tokens=8,
        ),
        # Longer chains and a second operation: errors accumulate over up to seven steps and
        # subtraction is learned from half of the examples.
        Task(
            name="stretch",
            min_terms=4,
            max_terms=8,
            smallest=2,
            largest=9,
            subtraction=True,
            max_prompt_tokens=72,
            max_response_tokens=96,
            overlong_buffer_tokens=8,
        ),
    )
}


def task_named(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"task: no task is called {name!r}; choose one of {', '.join(TASKS)}")
    return TASKS[name]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `terms` are signed, the first is positive: ``(7, 5, -3)`` is 7 + 5 - 3."""

    wording: Wording
    terms: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the order in which the question names them."""
        return tuple(abs(term) for term in self.terms)

    @property
    def answer(self) -> int:
        """The right result."""
        return sum(self.terms)

    @property
    def question(self) -> str:
        """The user's message."""
        subtracts = min(self.terms) < 0
        match self.wording:
            case Wording.FORMULA:
                body = f"What is {_formula(self.terms)}?"
            case Wording.COMMAND if subtracts:
                body = f"{_commands(self.terms)}. What is the result?"
            case Wording.COMMAND:
                body = f"Add {' and '.join(map(str, self.terms))}. What is the sum?"
            case Wording.STORY if subtracts:
                body = f"{_events(self.terms)}. How many now?"
            case Wording.STORY:
                gains = " then ".join(map(str, self.terms[1:]))
                body = f"Ann has {self.terms[0]} stamps and gets {gains} more. How many now?"
        return body + ANSWER_REQUEST


@dataclass(frozen=True, slots=True)
class ProblemSplit:
    """Problems to train on and problems held out; no sequence of numbers is in both."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def draw_problem(rng: random.Random, task: Task) -> Problem:
    """One problem: wording and number of terms uniform, then the terms."""
    wording = rng.choice(tuple(Wording))
    num_terms = rng.randint(task.min_terms, task.max_terms)
    total = 0
    terms: list[int] = []
    for _ in range(num_terms):
        number = rng.randint(task.smallest, task.largest)
        takes_away = task.subtraction and total >= number and rng.random() < 0.5
        term = -number if takes_away else number
        terms.append(term)
        total += term
    return Problem(wording, tuple(terms))


def split_problems(task: Task, seed: int, num_train: int, num_held_out: int) -> ProblemSplit:
    """Held-out problems with distinct numbers, then training problems without those numbers.

    Raises:
        ConfigError: the held-out problems would take more than half of the shortest sequences.
    """
    counts = task.max_terms - task.min_terms + 1
    if 2 * num_held_out > counts * task.num_sequences(task.min_terms):
        raise ConfigError(
            f"num_held_out: {num_held_out} problems leave too few of the "
            f"{task.num_sequences(task.min_terms)} sequences of {task.min_terms} numbers to train "
            "on; ask for fewer"
        )
    held_out = tuple(_draw_distinct(random.Random(f"{seed}/held-out"), task, num_held_out))
    held_out_numbers = {problem.numbers for problem in held_out}
    train = deal_problems(random.Random(f"{seed}/train"), task, held_out_numbers)
    return ProblemSplit(tuple(islice(train, num_train)), held_out)


def deal_problems(
    rng: random.Random, task: Task, barred_numbers: Collection[tuple[int, ...]]
) -> Iterator[Problem]:
    """Problems without end, none with barred numbers, repeated only when a cell is exhausted."""
    barred_by_length = Counter(map(len, barred_numbers))
    dealt: defaultdict[tuple[Wording, int], set[tuple[int, ...]]] = defaultdict(set)
    while True:
        problem = draw_problem(rng, task)
        num_terms = len(problem.terms)
        cell = dealt[problem.wording, num_terms]
        # With subtraction this is a lower bound of the cell's size: it counts each sequence once.
        if len(cell) >= task.num_sequences(num_terms) - barred_by_length[num_terms]:
            cell.clear()
        while problem.terms in cell or problem.numbers in barred_numbers:
            problem = _redraw_terms(rng, task, problem)
        cell.add(problem.terms)
        yield problem


def _redraw_terms(rng: random.Random, task: Task, problem: Problem) -> Problem:
    """Another problem of the same cell, so that repeats do not thin out the short problems."""
    while True:
        other = draw_problem(rng, task)
        if len(other.terms) == len(problem.terms):
            return Problem(problem.wording, other.terms)


def _draw_distinct(rng: random.Random, task: Task, count: int) -> Iterator[Problem]:
    seen: set[tuple[int, ...]] = set()
    while len(seen) < count:
        problem = draw_problem(rng, task)
        if problem.numbers not in seen:
            seen.add(problem.numbers)
            yield problem


def _formula(terms: tuple[int, ...]) -> str:
    signed = (f"{'-' if term < 0 else '+'} {abs(term)}" for term in terms[1:])
    return " ".join((str(terms[0]), *signed))


def _commands(terms: tuple[int, ...]) -> str:
    steps = (f"take away {-term}" if term < 0 else f"add {term}" for term in terms[1:])
    return ", ".join((f"Start with {terms[0]}", *steps))


def _events(terms: tuple[int, ...]) -> str:
    steps = (f"gives away {-term}" if term < 0 else f"gets {term}" for term in terms[1:])
    return ", ".join((f"Ann has {terms[0]} stamps", *steps))
