"""Make model and data set of the task with pictures."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice.quickstart.settings import PrepareProgress, PrepareSettings
from sluice.quickstart.shapes import ShapeQuestion, answer_text, questions, write_shapes
from sluice.quickstart.tokenizer import (
    IMAGE_PAD,
    TURN_END,
    VISION_CHAT_TEMPLATE,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    render_prompt,
    save_tokenizer,
    train_on_texts,
)
from sluice.types import IMAGE_MARK, TokenIds
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SHOWN = f"{VISION_START}{IMAGE_PAD}{VISION_END}"


def make_shapes(
    directory: Path,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> None:
    """Write `data/train.parquet`, `data/test.parquet` and `model/` into `directory`."""
    held_out = islice(questions(f"{seed}/held-out"), sizes.num_held_out)
    write_shapes(directory / "data" / "test.parquet", held_out, "test")
    train = islice(questions(f"{seed}/train"), sizes.num_train)
    write_shapes(directory / "data" / "train.parquet", train, "train")
    samples = islice(questions(f"{seed}/tokenizer"), sizes.num_tokenizer_dialogues)
    tokenizer = train_on_texts(map(_text, samples), VISION_TOKENS)
    progress(PrepareProgress("data", 1, 1))
    _make_model(directory / "model", tokenizer, seed, sizes, progress)


def _make_model(
    directory: Path,
    tokenizer: Tokenizer,
    seed: int,
    sizes: PrepareSettings,
    progress: Callable[[PrepareProgress], None],
) -> None:
    """Write a warm-started model with its tokenizer and image processor."""
    # Imported here, because present files need no torch.
    from sluice.quickstart.model import one_torch_thread, save_model
    from sluice.quickstart.vision_model import (
        MAX_POSITIONS,
        make_model,
        picture_dialogues,
        save_processor,
        warm_start_on_pictures,
    )

    def ids(text: str) -> TokenIds:
        return np.asarray(tokenizer.encode(text).ids, dtype=np.uint32)

    def report(step: int, total: int, loss: float) -> None:
        progress(PrepareProgress("warm-start", step, total, loss))

    shutil.rmtree(directory, ignore_errors=True)
    save_processor(directory)
    save_tokenizer(tokenizer, directory, MAX_POSITIONS, VISION_CHAT_TEMPLATE)
    model = make_model(tokenizer, seed)
    model.config.save_pretrained(directory)
    dialogues = picture_dialogues(
        questions(f"{seed}/warm-start"),
        _reader(directory),
        lambda question: ids(render_prompt(question.replace(IMAGE_MARK, _SHOWN))),
        lambda answer: ids(answer + TURN_END),
        random.Random(f"{seed}/warm-start/slips"),
        sizes.warm_start.wrong_step_rate,
    )
    with one_torch_thread():
        warm_start_on_pictures(model, dialogues, sizes.warm_start, report)
    save_model(model, directory)


def _reader(directory: Path) -> ImagePromptReader:
    reader = load_image_prompts(directory)
    assert reader is not None
    return reader


def _text(question: ShapeQuestion) -> str:
    prompt = render_prompt(question.question.replace(IMAGE_MARK, _SHOWN))
    return prompt + answer_text(question.answer)
