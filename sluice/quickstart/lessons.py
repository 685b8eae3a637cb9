"""Make a model that has imitated dialogues: tokenizer, weights and warm start from a stream of
lessons.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sluice.quickstart.settings import PrepareProgress, PrepareSettings
from sluice.quickstart.tokenizer import CHAT_TEMPLATE, save_tokenizer, train_on_texts


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a dialogue; the teacher wrote it if `is_answer`, else the policy reads it."""

    text: str
    is_answer: bool


@dataclass(frozen=True, slots=True)
class Lesson:
    """A dialogue, and the entropy of its teacher's choices in nats, which no model avoids.

    The first segment is the prompt.
    """

    segments: Sequence[Segment]
    entropy: float


@dataclass(frozen=True, slots=True)
class TaughtModel:
    """Figures of a model; the lengths, in tokens, are of the longest among some lessons."""

    num_parameters: int
    vocabulary_size: int
    longest_prompt_tokens: int
    longest_answer_tokens: int
    warm_start_steps: int
    warm_start_excess_loss: float


def make_taught_model(
    directory: Path,
    lessons: Callable[[str], Iterator[Lesson]],
    seed: int,
    sizes: PrepareSettings,
    *,
    special_tokens: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> TaughtModel:
    """Write a warm-started Qwen3 with its tokenizer into `directory`.

    Args:
        directory: the model's folder; what it holds is removed.
        lessons: returns lessons without end for a purpose, from a random stream of its own.
        seed: of the weights.
        sizes: of the warm start, and of the sample that the tokenizer is trained on.
        special_tokens: of the tokenizer, beside those of turns.
        chat_template: in Jinja.
        progress: called after the tokenizer, and after each step of the warm start.
    """
    # Imported here, because present files need no torch.
    from sluice.quickstart.model import (
        MAX_POSITIONS,
        WarmStartRow,
        make_model,
        one_torch_thread,
        save_model,
        warm_start_on_rows,
    )

    samples = list(islice(lessons("tokenizer"), sizes.num_tokenizer_dialogues))
    texts = ("".join(segment.text for segment in lesson.segments) for lesson in samples)
    tokenizer = train_on_texts(texts, special_tokens)
    progress(PrepareProgress("data", 1, 1))

    def row(lesson: Lesson) -> WarmStartRow:
        ids: list[int] = []
        is_answer: list[bool] = []
        for segment in lesson.segments:
            found = tokenizer.encode(segment.text).ids
            ids += found
            is_answer += [segment.is_answer] * len(found)
        return WarmStartRow(ids, is_answer, lesson.entropy)

    def report(step: int, total: int, loss: float) -> None:
        progress(PrepareProgress("warm-start", step, total, loss))

    model = make_model(tokenizer, seed)
    rows = map(row, lessons("warm-start"))
    with one_torch_thread():
        result = warm_start_on_rows(model, rows, sizes.warm_start, report)
    shutil.rmtree(directory, ignore_errors=True)
    save_model(model, directory)
    save_tokenizer(tokenizer, directory, MAX_POSITIONS, chat_template)
    encoded = [[len(tokenizer.encode(s.text).ids) for s in one.segments] for one in samples]
    return TaughtModel(
        num_parameters=model.num_parameters(),
        vocabulary_size=tokenizer.get_vocab_size(),
        longest_prompt_tokens=max(lengths[0] for lengths in encoded),
        longest_answer_tokens=max(sum(lengths[1:]) for lengths in encoded),
        warm_start_steps=result.num_steps,
        warm_start_excess_loss=result.excess_loss,
    )
