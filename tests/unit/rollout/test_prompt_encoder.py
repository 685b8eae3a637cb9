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


def test_a_text_begins_as_transformers_has_it_unless_it_is_told_not_to(with_bos: Path) -> None:
    encoded = encoder(with_bos)
    reference = AutoTokenizer.from_pretrained(str(with_bos), local_files_only=True)
    text = "1 + 2 = ?"
    assert encoded.encode_text(text).tolist() == reference(text)["input_ids"]
    assert encoded.encode_text(text)[0] == bos_of(with_bos)
    bare = encoded.encode_text(text, add_special_tokens=False).tolist()
    assert bare == reference(text, add_special_tokens=False)["input_ids"]
    assert encoded.encode_text(text).tolist() == [bos_of(with_bos), *bare]


def test_a_chat_gets_what_its_template_writes_and_no_more_unless_it_is_told_to(
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
