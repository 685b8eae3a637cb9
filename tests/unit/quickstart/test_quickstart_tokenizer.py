"""The tokenizer round-trips, splits digits and loads as a Hugging Face tokenizer, offline."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoTokenizer

from sluice.quickstart.arithmetic import TASKS, Dialogue, Task, deal_problems, make_dialogues
from sluice.quickstart.tokenizer import (
    TURN_END,
    render_prompt,
    save_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

QUICKSTART = TASKS["quickstart"]
QUESTION = "What is 12 + 6 + 9? End with 'Answer: N'."


def dialogues_of(task: Task, count: int) -> tuple[Dialogue, ...]:
    problems = islice(deal_problems(random.Random(0), task, ()), count)
    return tuple(make_dialogues(problems, random.Random(0), 0.35))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(dialogues_of(QUICKSTART, 500))


@pytest.mark.parametrize("text", ["2 + 6 = 8.\nAnswer: 8", "naïve → 数 17", "  \t\n"])
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("29 + 18 = 47.").tokens
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("291847")


def test_training_twice_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(dialogues_of(QUICKSTART, 500)).to_str() == tokenizer.to_str()


def test_a_saved_tokenizer_loads_and_renders_the_chat_template(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    save_tokenizer(tokenizer, tmp_path, 512)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    messages = [{"role": "user", "content": QUESTION}]
    rendered = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == render_prompt(QUESTION)
    assert rendered.startswith("<|im_start|>user\n")
    assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert loaded(rendered)["input_ids"] == tokenizer.encode(rendered).ids
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.eos_token_id == tokenizer.token_to_id("<|im_end|>")
    assert loaded.pad_token_id != loaded.eos_token_id
    assert loaded.model_max_length == 512


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_prompts_and_worked_answers_keep_the_tasks_token_limits(task: Task) -> None:
    dialogues = dialogues_of(task, 2000)
    trained = train_tokenizer(dialogues)
    prompts = [trained.encode(render_prompt(one.problem.question)).ids for one in dialogues]
    answers = [trained.encode(one.answer + TURN_END).ids for one in dialogues]
    free_of_penalty = task.max_response_tokens - task.overlong_buffer_tokens
    assert max(map(len, prompts)) <= task.max_prompt_tokens
    assert max(map(len, answers)) <= free_of_penalty + 1
    assert all(answer[-1] == trained.token_to_id("<|im_end|>") for answer in answers)
