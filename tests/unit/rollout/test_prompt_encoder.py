"""Prompts to token ids by the model's own tokenizer, within the length limit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from services.rollout.prompt_encoder import MAX_PROMPT_CHARACTERS, PromptEncoder
from sluice.data.prompt_length import Truncation
from sluice.errors import ConfigError, InvalidRequestError, PromptTooLongError
from sluice.quickstart.problems import draw_problem, task_named
from sluice.quickstart.tokenizer import render_prompt, save_tokenizer, train_tokenizer
from sluice.quickstart.worked_answers import make_dialogues
from sluice.types import ChatMessage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rng, task = random.Random(0), task_named("quickstart")
    problems = [draw_problem(rng, task) for _ in range(50)]
    save_tokenizer(train_tokenizer(make_dialogues(problems, rng, 0.1)), folder, 512)
    # A folder of a model says what it is; the encoder loads none of it.
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    return folder


def encoder(model: Path, limit: int = 64, truncation: Truncation = "error") -> PromptEncoder:
    return PromptEncoder(model, max_prompt_length=limit, truncation=truncation)


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


def test_a_long_prompt_is_refused_with_the_keys_that_help(model: Path) -> None:
    with pytest.raises(PromptTooLongError, match=r"exceed data\.max_prompt_length=6") as caught:
        encoder(model, 6).encode_text("1 2 3 4 5 6 7 8 9")
    assert "set data.truncation" in str(caught.value)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", slice(-5, None)), ("right", slice(0, 5)), ("middle", [0, 1, -3, -2, -1])],
)
def test_a_long_prompt_is_cut_to_the_limit_where_it_is_told(
    model: Path, truncation: Truncation, kept: slice | list[int]
) -> None:
    whole = encoder(model).encode_text("1 2 3 4 5 6 7 8 9")
    cut = encoder(model, 5, truncation).encode_text("1 2 3 4 5 6 7 8 9")
    assert cut.tolist() == whole[kept].tolist()


def test_a_filtered_prompt_is_refused_whatever_would_be_cut(model: Path) -> None:
    filtering = PromptEncoder(model, max_prompt_length=5, truncation="left", filter_overlong=True)
    with pytest.raises(PromptTooLongError):
        filtering.encode_text("1 2 3 4 5 6 7 8 9")


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
    encoded = PromptEncoder(
        folder,
        max_prompt_length=64,
        truncation="error",
        template_kwargs={"enable_thinking": thinking},
    )
    assert encoded.decode(encoded.encode_chat(user("3"))) == text


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "truncation"])
def test_arguments_that_the_encoder_decides_on_are_refused(model: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.apply_chat_template_kwargs: {name} cannot"):
        PromptEncoder(model, max_prompt_length=5, truncation="error", template_kwargs={name: True})


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
