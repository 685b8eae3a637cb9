"""Prompts with images: a place in the template, and a token for each merged patch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from services.rollout.prompt_encoder import PromptEncoder
from sluice.errors import InvalidRequestError
from sluice.types import ChatMessage
from tests.support.causal_lms import save_config
from tests.support.tiny_vision import IMAGE, VISION_END, VISION_START, image_file, save_model

SMALL, WIDE = image_file(0, 56, 56), image_file(1, 112, 56)
"""Of 4 and of 8 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", directory)
    return directory


def encoder(model: Path) -> PromptEncoder:
    return PromptEncoder(model)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def test_each_image_stands_where_its_mark_is_with_its_own_number_of_tokens(model: Path) -> None:
    encoded = encoder(model)
    ids = encoded.encode_chat(user("a<image>b<image>"), (WIDE, SMALL)).tolist()
    plain = encoded.encode_chat(user("ab")).tolist()
    wide = [VISION_START, *[IMAGE] * 8, VISION_END]
    small = [VISION_START, *[IMAGE] * 4, VISION_END]
    first = next(i for i in range(len(plain)) if plain[:i] != ids[:i]) - 1
    assert ids == [*plain[:first], *wide, plain[first], *small, *plain[first + 1 :]]


def test_marks_in_several_turns_take_the_images_in_order(model: Path) -> None:
    turns = [
        ChatMessage("user", "<image>?"),
        ChatMessage("assistant", "red"),
        ChatMessage("user", "and <image>"),
    ]
    ids = encoder(model).encode_chat(turns, (SMALL, WIDE))
    ends = np.flatnonzero(ids == VISION_END) - np.flatnonzero(ids == VISION_START) - 1
    assert ends.tolist() == [4, 8]


def test_a_text_without_images_is_never_split(model: Path) -> None:
    ids = encoder(model).encode_chat(user("what does <image> mean?"))
    assert IMAGE not in ids
    assert "<image>" in encoder(model).decode(ids)


@pytest.mark.parametrize(("text", "marks"), [("none", 0), ("<image><image>", 2)])
def test_as_many_marks_as_images_are_asked_for(model: Path, text: str, marks: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"1 for {marks} times <image> in the texts"):
        encoder(model).encode_chat(user(text), (SMALL,))


def test_the_models_own_image_token_in_the_text_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="1 images, but 2 places"):
        encoder(model).encode_chat(user("<image> <|image_pad|>"), (SMALL,))


def test_a_template_that_shows_no_images_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequestError, match=r"1 images, but 0 places .* chat template"):
        encoder(tmp_path / "model").encode_chat(user("<image>"), (SMALL,))


def test_what_is_no_image_is_refused_by_its_number(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"images\[1\]: 5 bytes .* are no image"):
        encoder(model).encode_chat(user("<image><image>"), (SMALL, b"rubbi"))


def test_a_text_model_refuses_images(model: Path, tmp_path: Path) -> None:
    save_config("qwen3", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, tmp_path / name)
    with pytest.raises(InvalidRequestError, match="1 for a model that reads text alone"):
        encoder(tmp_path).encode_chat(user("<image>"), (SMALL,))
