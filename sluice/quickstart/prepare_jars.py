"""Make model and data set of the task with a tool."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from sluice.quickstart.jars import (
    CALL,
    END_CALL,
    JARS,
    TOOL_CHAT_TEMPLATE,
    jar_problems,
    teach,
    write_jars,
)
from sluice.quickstart.lessons import Lesson, make_taught_model
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, QuickstartFacts


def make_jars(
    directory: Path,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> QuickstartFacts:
    """Write `data/train.parquet`, `data/test.parquet` and `model/` into `directory`."""
    started = time.monotonic()
    for split, number in (("test", sizes.num_held_out), ("train", sizes.num_train)):
        problems = islice(jar_problems(f"{seed}/{split}"), number)
        write_jars(directory / "data" / f"{split}.parquet", problems, split)
    guess_rate = sizes.warm_start.wrong_step_rate
    taught = make_taught_model(
        directory / "model",
        lambda purpose: _lessons(f"{seed}/{purpose}", guess_rate),
        seed,
        sizes,
        special_tokens=(CALL, END_CALL),
        chat_template=TOOL_CHAT_TEMPLATE,
        progress=progress,
    )
    return QuickstartFacts(
        **asdict(taught),
        num_train=sizes.num_train,
        num_held_out=sizes.num_held_out,
        seconds=time.monotonic() - started,
    )


def _lessons(stream: str, guess_rate: float) -> Iterator[Lesson]:
    from sluice.quickstart.model import slip_entropy  # needs torch

    guesses = random.Random(f"{stream}/guesses")
    guessed = guess_rate * math.log(JARS.largest - JARS.smallest + 1)
    for problem in jar_problems(stream):
        entropy = len(problem.asked) * (slip_entropy(guess_rate) + guessed)
        yield Lesson(teach(problem, guesses, guess_rate), entropy)
