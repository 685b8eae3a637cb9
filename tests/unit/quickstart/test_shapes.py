"""The task with pictures: pictures match the questions, and the files load."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from transformers import AutoModelForImageTextToText

from services.reward.grading.scorers.registry import RULES
from services.rollout.prompt_encoder import PromptEncoder
from sluice.quickstart.prepare import prepare
from sluice.quickstart.settings import PrepareProgress, PrepareSettings, WarmStartSettings
from sluice.quickstart.shapes import (
    CELL_PIXELS,
    SHAPES,
    ShapeQuestion,
    answer_text,
    picture,
    questions,
)
from sluice.types import ChatMessage
from sluice.vision.image_prompts import load_image_prompts

SMALL = PrepareSettings(
    num_train=40,
    num_held_out=8,
    num_tokenizer_dialogues=200,
    warm_start=WarmStartSettings(max_hold_steps=2, decay_steps=1, batch_dialogues=4),
)


def asked(count: int, seed: str = "0") -> list[ShapeQuestion]:
    return list(islice(questions(seed), count))


def test_equal_seeds_ask_equal_questions_and_all_kinds_come() -> None:
    assert asked(300) == asked(300)
    assert asked(5) != asked(5, "1")
    assert {question.answer for question in asked(300)} == {
        *("1", "2", "3", "4", "red", "green", "blue", "yellow")
    }


def test_a_picture_shows_as_many_spots_as_the_scene_has_shapes_and_in_its_colour() -> None:
    for question in asked(40):
        image = Image.open(io.BytesIO(picture(question.scene)))
        pixels = np.asarray(image)
        cells = pixels.reshape(3, CELL_PIXELS, 3, CELL_PIXELS, 3).transpose(0, 2, 1, 3, 4)
        filled = (cells != 255).any(axis=(2, 3, 4)).sum()
        assert filled == len(question.scene.shapes)
        colours = {tuple(c) for c in pixels.reshape(-1, 3).tolist()} - {(255, 255, 255)}
        assert len(colours) == 1


def test_the_right_answer_is_scored_right_and_the_slip_wrong() -> None:
    for question in asked(60):
        right, slip = (
            RULES["math_dapo"](answer_text(said), question.answer)
            for said in (question.answer, question.slip)
        )
        assert (right["acc"], slip["acc"]) == (1.0, 0.0)  # type: ignore[index]


def test_a_made_directory_is_a_model_with_processor_and_rows_with_images(tmp_path: Path) -> None:
    events: list[PrepareProgress] = []
    made = prepare(tmp_path, task="shapes", seed=0, progress=events.append, settings=SMALL)
    model = AutoModelForImageTextToText.from_pretrained(made.model_dir, local_files_only=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert [event.done for event in events] == [1, 1, 2, 3]
    encoder = PromptEncoder(made.model_dir)
    reader = load_image_prompts(made.model_dir)
    assert reader is not None
    rows = pq.read_table(made.train_file).to_pylist()
    assert len(rows) == 40
    for row in rows:
        (image,) = row["images"]
        turns = [ChatMessage(**turn) for turn in row["prompt"]]
        ids = encoder.encode_chat(turns, (image["bytes"],))
        assert ids.size <= SHAPES.max_prompt_tokens
        assert reader.read(ids, (image["bytes"],)).places.size == 9


def test_directories_are_used_again_and_seeds_make_other_files(tmp_path: Path) -> None:
    first = prepare(tmp_path, task="shapes", seed=0, progress=lambda _: None, settings=SMALL)
    before = first.train_file.read_bytes(), (first.model_dir / "model.safetensors").read_bytes()
    events: list[PrepareProgress] = []
    prepare(tmp_path, task="shapes", seed=0, progress=events.append, settings=SMALL)
    assert [event.stage for event in events] == ["reused"]
    other = prepare(tmp_path, task="shapes", seed=1, progress=lambda _: None, settings=SMALL)
    after = other.train_file.read_bytes(), (other.model_dir / "model.safetensors").read_bytes()
    assert before[0] != after[0]
    assert before[1] != after[1]
