"""Prompts to token ids by the model's own tokenizer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from services.rollout.prompt_encoder import MAX_PROMPT_CHARACTERS, PromptEncoder
from sluice.errors import ConfigError, InvalidRequestError
from sluice.quickstart.arithmetic import TASKS, draw_problem, make_dialogues
from sluice.quickstart.tokenizer import TURN_START, render_prompt, save_tokenizer, train_tokenizer
from sluice.types import ChatMessage
from tests.support.causal_lms import save_config
from tests.support.tiny_vision import IMAGE, VISION_END, VISION_START, image_file, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rng, task = random.Random(0), TASKS["quickstart"]
    problems = [draw_problem(rng, task) for _ in range(50)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), folder, 512)
    # A folder of a model says what it is; the encoder loads none of it.
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    return folder


def encoder(model: Path) -> PromptEncoder:
    return PromptEncoder(model)


@pytest.fixture(scope="module")
def with_bos(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that begins texts with a special token, as those of Llama and Gemma do."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(model, folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bos = tokenizer.token_to_id(TURN_START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{TURN_START} $A", special_tokens=[(TURN_START, bos)]
    )
    tokenizer.save(file)
    return folder


def bos_of(model: Path) -> int:
    return int(Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(TURN_START))


def test_a_text_begins_as_in_transformers_by_default(with_bos: Path) -> None:
    encoded = encoder(with_bos)
    reference = AutoTokenizer.from_pretrained(str(with_bos), local_files_only=True)
    text = "1 + 2 = ?"
    assert encoded.encode_text(text).tolist() == reference(text)["input_ids"]
    assert encoded.encode_text(text)[0] == bos_of(with_bos)
    bare = encoded.encode_text(text, add_special_tokens=False).tolist()
    assert bare == reference(text, add_special_tokens=False)["input_ids"]
    assert encoded.encode_text(text).tolist() == [bos_of(with_bos), *bare]


def test_a_chat_gets_what_its_template_writes_and_by_default_no_more(
    with_bos: Path,
) -> None:
    encoded, turns = encoder(with_bos), user("1 + 2 = ?")
    ids = encoded.encode_chat(turns).tolist()
    rendered = render_prompt("1 + 2 = ?")
    assert ids == encoded.encode_text(rendered, add_special_tokens=False).tolist()
    assert encoded.encode_chat(turns, add_special_tokens=True).tolist() == [bos_of(with_bos), *ids]


def test_a_text_of_nothing_is_a_prompt_where_the_tokenizer_begins_it(with_bos: Path) -> None:
    assert encoder(with_bos).encode_text("").tolist() == [bos_of(with_bos)]


def test_a_cut_that_the_tokenizers_file_asks_for_is_not_made(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save(file)
    for text in ("1 2 3 4 5 6 7 8 9", "1"):
        found = encoder(folder).encode_text(text).tolist()
        assert found == encoder(model).encode_text(text).tolist()


def user(content: str) -> list[ChatMessage]:
    return [ChatMessage("user", content)]


def test_a_conversation_is_rendered_by_the_template_and_waits_for_the_answer(model: Path) -> None:
    encoded = encoder(model)
    ids = encoded.encode_chat(user("1 + 2 = ?"))
    assert ids.dtype == np.uint32
    assert ids.tolist() == encoded.encode_text(render_prompt("1 + 2 = ?")).tolist()


def test_text_survives_the_way_there_and_back(model: Path) -> None:
    encoded = encoder(model)
    assert encoded.decode(encoded.encode_text("12 + 7 = 19 ✓")) == "12 + 7 = 19 ✓"


def test_special_tokens_are_left_out_of_the_text(model: Path) -> None:
    encoded = encoder(model)
    text = encoded.decode(encoded.encode_chat(user("1 + 2 = ?")))
    assert "1 + 2 = ?" in text
    assert "<" not in text


TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking %} 1 {% else %} 2 {% endif %}"
)


@pytest.mark.parametrize(("thinking", "text"), [(True, "3 1 "), (False, "3 2 ")])
def test_the_template_gets_the_arguments_that_are_configured(
    model: Path, tmp_path: Path, thinking: bool, text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    encoded = PromptEncoder(folder, template_kwargs={"enable_thinking": thinking})
    assert encoded.decode(encoded.encode_chat(user("3"))) == text
    other = encoded.encode_chat(user("3"), template_kwargs={"enable_thinking": not thinking})
    assert encoded.decode(other) != text
    assert encoded.decode(encoded.encode_chat(user("3"))) == text  # for that call alone


@pytest.mark.parametrize(
    "name", ["tokenize", "add_generation_prompt", "truncation", "chat_template"]
)
def test_arguments_that_the_encoder_decides_on_are_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.apply_chat_template_kwargs: {name} cannot"):
        PromptEncoder(model, template_kwargs={name: True})
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs: {name} cannot be set"):
        encoder(model).encode_chat(user("3"), template_kwargs={name: True})


def test_a_monstrous_prompt_is_refused_before_it_is_tokenised(model: Path) -> None:
    monster = "a" * (MAX_PROMPT_CHARACTERS + 1)
    for encode in (encoder(model).encode_text, lambda text: encoder(model).encode_chat(user(text))):
        with pytest.raises(InvalidRequestError, match=r"200000\d characters; send at most 2000000"):
            encode(monster)


def test_roles_count_as_much_as_what_is_said(model: Path) -> None:
    turns = [ChatMessage("a" * MAX_PROMPT_CHARACTERS, "b")]
    with pytest.raises(InvalidRequestError, match=r"2000001 characters; send at most 2000000"):
        encoder(model).encode_chat(turns)


def test_an_empty_prompt_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: no tokens"):
        encoder(model).encode_text("")


def test_a_folder_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path") as caught:
        encoder(tmp_path)
    assert str(tmp_path) in str(caught.value)


SMALL, WIDE = image_file(0, 56, 56), image_file(1, 112, 56)
"""Of 4 and of 8 tokens."""


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen2_5_vl", directory)
    return directory


def user_turns(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def test_each_image_stands_where_its_mark_is_with_its_own_number_of_tokens(
    vision_model: Path,
) -> None:
    encoded = encoder(vision_model)
    ids = encoded.encode_chat(user_turns("a<image>b<image>"), (WIDE, SMALL)).tolist()
    plain = encoded.encode_chat(user_turns("ab")).tolist()
    wide = [VISION_START, *[IMAGE] * 8, VISION_END]
    small = [VISION_START, *[IMAGE] * 4, VISION_END]
    first = next(i for i in range(len(plain)) if plain[:i] != ids[:i]) - 1
    assert ids == [*plain[:first], *wide, plain[first], *small, *plain[first + 1 :]]


def test_marks_in_several_turns_take_the_images_in_order(vision_model: Path) -> None:
    turns = [
        ChatMessage("user", "<image>?"),
        ChatMessage("assistant", "red"),
        ChatMessage("user", "and <image>"),
    ]
    ids = encoder(vision_model).encode_chat(turns, (SMALL, WIDE))
    ends = np.flatnonzero(ids == VISION_END) - np.flatnonzero(ids == VISION_START) - 1
    assert ends.tolist() == [4, 8]


def test_a_text_without_images_is_never_split(vision_model: Path) -> None:
    ids = encoder(vision_model).encode_chat(user_turns("what does <image> mean?"))
    assert IMAGE not in ids
    assert "<image>" in encoder(vision_model).decode(ids)


@pytest.mark.parametrize(("text", "marks"), [("none", 0), ("<image><image>", 2)])
def test_as_many_marks_as_images_are_asked_for(vision_model: Path, text: str, marks: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"1 images, but {marks} places"):
        encoder(vision_model).encode_chat(user_turns(text), (SMALL,))


def test_the_models_own_image_token_in_the_text_is_refused(
    vision_model: Path,
) -> None:
    with pytest.raises(InvalidRequestError, match="1 images, but 2 places"):
        encoder(vision_model).encode_chat(user_turns("<image> <|image_pad|>"), (SMALL,))


def test_a_template_that_shows_no_images_is_refused(vision_model: Path, tmp_path: Path) -> None:
    shutil.copytree(vision_model, tmp_path / "model")
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequestError, match=r"1 images, but 0 places .* chat template"):
        encoder(tmp_path / "model").encode_chat(user_turns("<image>"), (SMALL,))


def test_what_is_no_image_is_refused_by_its_number(vision_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"images\[1\]: 5 bytes .* are no image"):
        encoder(vision_model).encode_chat(user_turns("<image><image>"), (SMALL, b"rubbi"))


def test_a_text_model_refuses_images(vision_model: Path, tmp_path: Path) -> None:
    save_config("qwen3", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(vision_model / name, tmp_path / name)
    with pytest.raises(InvalidRequestError, match="1 for a model that reads only text"):
        encoder(tmp_path).encode_chat(user_turns("<image>"), (SMALL,))


def test_a_tokenizer_without_a_chat_template_refuses_chats_and_reads_text(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    bare = encoder(folder)
    with pytest.raises(InvalidRequestError, match=f"{folder} has no chat template; save one as"):
        bare.encode_chat(user("1 + 2 = ?"))
    assert bare.encode_text("1 + 2 = ?").size
