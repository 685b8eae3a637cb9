"""The task with a tool: add numbers that only an environment knows.

"Add jar C and F and A." The numbers are in the jars, and not in the prompt: the policy looks each
one up by a call of the tool `look`, and adds it to a running total. The warm start imitates
teachers that guess some numbers instead of looking, and so are often wrong; reinforcement learning
makes the policy look. With the running total each answer depends on the last observation alone,
which a model of two layers learns in seconds.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from sluice.quickstart.arithmetic import ANSWER_REQUEST, row_schema, verl_row, write_rows
from sluice.quickstart.lessons import Lesson, Segment, make_taught_model
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, QuickstartTask
from sluice.quickstart.tokenizer import TURN_END, TURN_START

LETTERS = "ABCDEFGHIJ"
TOOL = "look"
CALL, END_CALL = "<tool_call>", "</tool_call>"

TOOL_CHAT_TEMPLATE = (
    "{%- if tools -%}{{ '<|im_start|>system\\n' }}"
    "{%- for tool in tools -%}{{ tool['function']['name'] + '\\n' }}{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set function = call['function'] -%}"
    "{{ '<tool_call>{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}"
    "{{ function['arguments'] | tojson }}{{ '}</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

_JARS = pa.struct([(letter, pa.int64()) for letter in LETTERS])


JARS = QuickstartTask(
    name="jars",
    max_prompt_tokens=48,
    max_response_tokens=224,
    overlong_buffer_tokens=8,
    overrides=(
        f"sluice.environment.path={Path(__file__).with_name('jar_environment.py')}",
        "sluice.environment.name=Jars",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
        # Smaller batches than of the other tasks, and no validation in between: late steps filter
        # most groups, and episodes are long.
        "data.train_batch_size=40",
        "actor_rollout_ref.actor.ppo_mini_batch_size=20",
        "trainer.total_training_steps=10",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
    ),
)
_ASKED = 2, 4
"""Jars of a problem, at least and at most."""
_NUMBERS = 2, 9
"""In a jar."""


@dataclass(frozen=True, slots=True)
class JarProblem:
    """The jars to add, and the number in each of the ten."""

    asked: tuple[str, ...]
    jars: dict[str, int]

    @property
    def question(self) -> str:
        """The user's message."""
        return f"Add jar {' and '.join(self.asked)}.{ANSWER_REQUEST}"

    @property
    def answer(self) -> int:
        """The correct result."""
        return sum(self.jars[letter] for letter in self.asked)


def jar_problems(stream: str) -> Iterator[JarProblem]:
    """Yield problems without end; `stream` seeds them."""
    rng = random.Random(stream)
    while True:
        letters = rng.sample(LETTERS, rng.randint(*_ASKED))
        jars = {letter: rng.randint(*_NUMBERS) for letter in LETTERS}
        yield JarProblem(tuple(letters), jars)


def render_question(question: str) -> str:
    """Return the prompt with the tool, as the chat template renders it."""
    rendered = f"{TURN_START}system\n{TOOL}\n{TURN_END}\n{TURN_START}user\n{question}{TURN_END}\n"
    return f"{rendered}{TURN_START}assistant\n"


def teach(problem: JarProblem, rng: random.Random, guess_rate: float) -> list[Segment]:
    """Return a dialogue: a teacher looks each number up, or guesses it with `guess_rate`."""
    segments = [Segment(render_question(problem.question), is_answer=False)]
    total, answer = 0, ""
    for letter in problem.asked:
        if rng.random() < guess_rate:
            number = rng.randint(*_NUMBERS)
        else:
            number = problem.jars[letter]
            call = json.dumps({"name": TOOL, "arguments": {"jar": letter}})
            segments.append(Segment(f"{answer}{CALL}{call}{END_CALL}{TURN_END}", is_answer=True))
            result = f"\n{TURN_START}tool\n{number}{TURN_END}\n{TURN_START}assistant\n"
            segments.append(Segment(result, is_answer=False))
            answer = ""
        answer += f"{total} + {number} = {total + number}.\n"
        total += number
    segments.append(Segment(f"{answer}Answer: {total}{TURN_END}", is_answer=True))
    return segments


def write_jars(path: Path, problems: Iterable[JarProblem], split: str) -> None:
    """Write the problems in order."""
    rows = [
        verl_row(problem.question, str(problem.answer), index, split, jars=problem.jars)
        for index, problem in enumerate(problems)
    ]
    write_rows(path, rows, row_schema(jars=_JARS))


def make_jars(
    directory: Path,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> None:
    """Write `data/train.parquet`, `data/test.parquet` and `model/` into `directory`."""
    for split, number in (("test", sizes.num_held_out), ("train", sizes.num_train)):
        problems = islice(jar_problems(f"{seed}/{split}"), number)
        write_jars(directory / "data" / f"{split}.parquet", problems, split)
    guess_rate = sizes.warm_start.wrong_step_rate
    make_taught_model(
        directory / "model",
        lambda purpose: _lessons(f"{seed}/{purpose}", guess_rate),
        seed,
        sizes,
        special_tokens=(CALL, END_CALL),
        chat_template=TOOL_CHAT_TEMPLATE,
        progress=progress,
    )


def _lessons(stream: str, guess_rate: float) -> Iterator[Lesson]:
    from sluice.quickstart.model import slip_entropy  # needs torch

    guesses = random.Random(f"{stream}/guesses")
    guessed = guess_rate * math.log(_NUMBERS[1] - _NUMBERS[0] + 1)
    for problem in jar_problems(stream):
        entropy = len(problem.asked) * (slip_entropy(guess_rate) + guessed)
        yield Lesson(teach(problem, guesses, guess_rate), entropy)
