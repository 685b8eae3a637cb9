"""Make a model that has imitated dialogues: tokenizer, weights and warm start from a stream of
lessons.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.quickstart.arithmetic import Dialogue
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, WarmStartSettings
from sluice.quickstart.tokenizer import (
    CHAT_TEMPLATE,
    TURN_END,
    render_prompt,
    save_tokenizer,
    train_on_texts,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from sluice.quickstart.model import QuickstartModel, WarmStartRow


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


def lesson_of(dialogue: Dialogue, slip_entropy: float) -> Lesson:
    """Return the lesson of a worked answer; `slip_entropy`: of each of its steps, in nats."""
    problem = dialogue.problem
    segments = (
        Segment(render_prompt(problem.question), is_answer=False),
        Segment(dialogue.answer + TURN_END, is_answer=True),
    )
    return Lesson(segments, slip_entropy * (len(problem.terms) - 1))


def make_taught_model(
    directory: Path,
    lessons: Callable[[str], Iterator[Lesson]],
    seed: int,
    sizes: PrepareSettings,
    *,
    special_tokens: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> None:
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
    from sluice.quickstart.model import make_model

    samples = islice(lessons("tokenizer"), sizes.num_tokenizer_dialogues)
    texts = ("".join(segment.text for segment in lesson.segments) for lesson in samples)
    tokenizer = train_on_texts(texts, special_tokens)
    progress(PrepareProgress("data", 1, 1))
    model = make_model(tokenizer, seed)
    save_taught(
        directory,
        model,
        tokenizer,
        lessons("warm-start"),
        sizes.warm_start,
        progress,
        chat_template,
    )


def save_taught(
    directory: Path,
    model: QuickstartModel,
    tokenizer: Tokenizer,
    lessons: Iterable[Lesson],
    settings: WarmStartSettings,
    progress: Callable[[PrepareProgress], None],
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Let `model` imitate lessons, as many as it needs, and write it with its tokenizer.

    What `directory` holds is removed.
    """
    from sluice.quickstart.model import MAX_POSITIONS, one_torch_thread, save_model, warm_start

    rows = (warm_start_row(tokenizer, lesson) for lesson in lessons)
    with one_torch_thread():
        warm_start(model, rows, settings, progress)
    shutil.rmtree(directory, ignore_errors=True)
    save_model(model, directory)
    save_tokenizer(tokenizer, directory, MAX_POSITIONS, chat_template)


def warm_start_row(tokenizer: Tokenizer, lesson: Lesson) -> WarmStartRow:
    """Return the token ids of a lesson, each segment encoded for itself."""
    from sluice.quickstart.model import WarmStartRow

    ids: list[int] = []
    is_answer: list[bool] = []
    for segment in lesson.segments:
        token_ids = tokenizer.encode(segment.text).ids
        ids += token_ids
        is_answer += [segment.is_answer] * len(token_ids)
    return WarmStartRow(ids, is_answer, lesson.entropy)
