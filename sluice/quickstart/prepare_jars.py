"""Make model and data set of the task with a tool."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.quickstart.jars import (
    CALL,
    END_CALL,
    JARS,
    TOOL_CHAT_TEMPLATE,
    JarProblem,
    Segment,
    jar_problems,
    teach,
    write_jars,
)
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, QuickstartFacts
from sluice.quickstart.tokenizer import save_tokenizer, train_on_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sluice.quickstart.model import WarmStartRow


def make_jars(
    directory: Path,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> QuickstartFacts:
    """Write `data/train.parquet`, `data/test.parquet` and `model/` into `directory`."""
    # Imported here, because present files need no torch.
    from sluice.quickstart.model import (
        MAX_POSITIONS,
        make_model,
        one_torch_thread,
        save_model,
        warm_start_on_rows,
    )

    started = time.monotonic()
    for split, number in (("test", sizes.num_held_out), ("train", sizes.num_train)):
        problems = islice(jar_problems(f"{seed}/{split}"), number)
        write_jars(directory / "data" / f"{split}.parquet", problems, split)
    guess_rate = sizes.warm_start.wrong_step_rate
    samples = list(islice(_dialogues(f"{seed}/tokenizer", guess_rate), 2_000))
    tokenizer = train_on_texts(
        ("".join(segment.text for segment in parts) for _, parts in samples), (CALL, END_CALL)
    )
    progress(PrepareProgress("data", 1, 1))

    def report(step: int, total: int, loss: float) -> None:
        progress(PrepareProgress("warm-start", step, total, loss))

    model = make_model(tokenizer, seed)
    rows = (
        _row(tokenizer, problem, parts, guess_rate)
        for problem, parts in _dialogues(f"{seed}/warm-start", guess_rate)
    )
    with one_torch_thread():
        result = warm_start_on_rows(model, rows, sizes.warm_start, report)
    shutil.rmtree(directory / "model", ignore_errors=True)
    save_model(model, directory / "model")
    save_tokenizer(tokenizer, directory / "model", MAX_POSITIONS, TOOL_CHAT_TEMPLATE)
    encoded = [[len(tokenizer.encode(part.text).ids) for part in parts] for _, parts in samples]
    return QuickstartFacts(
        num_parameters=model.num_parameters(),
        vocabulary_size=tokenizer.get_vocab_size(),
        num_train=sizes.num_train,
        num_held_out=sizes.num_held_out,
        longest_prompt_tokens=max(lengths[0] for lengths in encoded),
        longest_answer_tokens=max(sum(lengths[1:]) for lengths in encoded),
        warm_start_steps=result.num_steps,
        warm_start_excess_loss=result.excess_loss,
        seconds=time.monotonic() - started,
    )


def _dialogues(stream: str, guess_rate: float) -> Iterator[tuple[JarProblem, list[Segment]]]:
    guesses = random.Random(f"{stream}/guesses")
    for problem in jar_problems(stream):
        yield problem, teach(problem, guesses, guess_rate)


def _row(
    tokenizer: Tokenizer, problem: JarProblem, parts: list[Segment], guess_rate: float
) -> WarmStartRow:
    from sluice.quickstart.model import WarmStartRow, slip_entropy

    ids: list[int] = []
    is_answer: list[bool] = []
    for part in parts:
        found = tokenizer.encode(part.text).ids
        ids += found
        is_answer += [part.is_answer] * len(found)
    guessed = guess_rate * math.log(JARS.largest - JARS.smallest + 1)
    return WarmStartRow(ids, is_answer, len(problem.asked) * (slip_entropy(guess_rate) + guessed))
