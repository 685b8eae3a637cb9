"""The arithmetic tasks: problems, worked answers with slips, and parquet files like DAPO-Math's.

Worked answers are imitated by the supervised warm start. A slip makes the result of one step ten
too large; later steps continue correctly with the wrong number, so the final answer agrees with
the steps above it. A model that imitates such teachers knows the format and the arithmetic and
slips about as often as they do. Reinforcement learning removes the slips.

Why ten: it is one decision at one digit, which a small model confuses with nothing else. It would
mix up off-by-one slips with its own inexact arithmetic, and need several times as many samples to
unlearn them. Why always upwards: two slips then never cancel, so no wrong working is rewarded.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.errors import ConfigError
from sluice.quickstart.settings import QuickstartTask

Family = Literal["qwen2", "qwen3"]

ANSWER_REQUEST = " End with 'Answer: N'."
SLIP = 10
DATA_SOURCE = "math_dapo"
ROW_GROUP_ROWS = 1024


class Wording(StrEnum):
    """The wording of a question."""

    FORMULA = "formula"
    COMMAND = "command"
    STORY = "story"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(QuickstartTask):
    """A family of problems.

    Terms lie in ``[smallest, largest]``; a problem has ``min_terms`` to ``max_terms`` of them,
    each count equally likely. With `subtraction`, about half of the terms after the first are
    subtracted, never below a total of 0. The model's layers have `num_experts`, or are dense; only
    a Qwen3 has experts.
    """

    min_terms: int
    max_terms: int
    smallest: int
    largest: int
    subtraction: bool
    num_experts: int = 0
    family: Family = "qwen3"

    def num_sequences(self, num_terms: int) -> int:
        """Return the number of sequences of numbers, without signs."""
        return int((self.largest - self.smallest + 1) ** num_terms)


_QUICKSTART = Task(
    name="quickstart",
    min_terms=3,
    max_terms=5,
    smallest=2,
    largest=9,
    subtraction=False,
    max_prompt_tokens=48,
    max_response_tokens=56,
    overlong_buffer_tokens=8,
)
TASKS = {
    task.name: task
    for task in (
        _QUICKSTART,
        replace(_QUICKSTART, name="experts", num_experts=8),
        replace(_QUICKSTART, name="qwen2", family="qwen2"),
        # Longer chains and a second operation: errors accumulate over up to seven steps and
        # only half of the examples teach subtraction.
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


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """One problem. `terms` are signed, and the first is positive: ``(7, 5, -3)`` is 7 + 5 - 3."""

    wording: Wording
    terms: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers in the order of the question."""
        return tuple(abs(term) for term in self.terms)

    @property
    def answer(self) -> int:
        """The correct result."""
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
    """Training problems and held-out problems; no sequence of numbers is in both."""

    train: tuple[ArithmeticProblem, ...]
    held_out: tuple[ArithmeticProblem, ...]


def draw_problem(rng: random.Random, task: Task) -> ArithmeticProblem:
    """Sample a problem: wording and number of terms uniformly, then the terms."""
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
    return ArithmeticProblem(wording, tuple(terms))


def split_problems(task: Task, seed: int, num_train: int, num_held_out: int) -> ProblemSplit:
    """Return held-out problems with distinct numbers, and training problems without those.

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
) -> Iterator[ArithmeticProblem]:
    """Yield problems without end and without barred numbers.

    A cell is a wording with a number of terms. A problem repeats only after all others of its cell.
    """
    barred_by_length = Counter(map(len, barred_numbers))
    dealt: defaultdict[tuple[Wording, int], set[tuple[int, ...]]] = defaultdict(set)
    while True:
        problem = draw_problem(rng, task)
        num_terms = len(problem.terms)
        cell = dealt[problem.wording, num_terms]
        # With subtraction this is a lower bound of the cell's size: signs are not counted.
        if len(cell) >= task.num_sequences(num_terms) - barred_by_length[num_terms]:
            cell.clear()
        while problem.terms in cell or problem.numbers in barred_numbers:
            problem = _redraw_terms(rng, task, problem)
        cell.add(problem.terms)
        yield problem


def _redraw_terms(rng: random.Random, task: Task, problem: ArithmeticProblem) -> ArithmeticProblem:
    """Sample another problem of the same cell, so that repeats do not thin out short problems."""
    while True:
        redrawn = draw_problem(rng, task)
        if len(redrawn.terms) == len(problem.terms):
            return ArithmeticProblem(problem.wording, redrawn.terms)


def _draw_distinct(rng: random.Random, task: Task, count: int) -> Iterator[ArithmeticProblem]:
    sampled_numbers: set[tuple[int, ...]] = set()
    while len(sampled_numbers) < count:
        problem = draw_problem(rng, task)
        if problem.numbers not in sampled_numbers:
            sampled_numbers.add(problem.numbers)
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


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A problem with one worked answer to it."""

    problem: ArithmeticProblem
    answer: str


def work_out(problem: ArithmeticProblem, rng: random.Random, wrong_step_rate: float) -> str:
    """Return one step per term after the first, then a line ``Answer: N``.

    Each step is wrong with probability `wrong_step_rate`, independently.
    """
    total = problem.terms[0]
    steps: list[str] = []
    for term in problem.terms[1:]:
        result = total + term
        if rng.random() < wrong_step_rate:
            result += SLIP
        steps.append(f"{total} {'-' if term < 0 else '+'} {abs(term)} = {result}.")
        total = result
    return f"{' '.join(steps)}\nAnswer: {total}"


def make_dialogues(
    problems: Iterable[ArithmeticProblem], rng: random.Random, wrong_step_rate: float
) -> Iterator[Dialogue]:
    """Yield one worked answer for each problem, in order."""
    for problem in problems:
        yield Dialogue(problem, work_out(problem, rng, wrong_step_rate))


def write_dataset(path: Path, problems: Iterable[ArithmeticProblem], split: str) -> None:
    """Write the problems in order, as rows like those of DAPO-Math."""
    rows = [
        verl_row(problem.question, str(problem.answer), index, split, num_terms=len(problem.terms))
        for index, problem in enumerate(problems)
    ]
    write_rows(path, rows, row_schema(num_terms=pa.int64()))


def row_schema(**extra_info: pa.DataType) -> pa.Schema:
    """Return the columns of DAPO-Math."""
    extra = [("index", pa.int64()), ("split", pa.string()), *extra_info.items()]
    return pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
            ("extra_info", pa.struct(extra)),
        ]
    )


def verl_row(
    question: str, truth: str, index: int, split: str, **extra_info: object
) -> dict[str, object]:
    """Return a row: the question as the only user message, the correct result as ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "split": split, **extra_info},
    }


def write_rows(path: Path, rows: list[dict[str, object]], schema: pa.Schema) -> None:
    """Write rows in order, in row groups that are small enough to stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS)
