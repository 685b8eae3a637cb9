"""The warm start trains on answers only, repeatably, and lowers the loss within a few steps."""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from sluice.quickstart.arithmetic import TASKS, Dialogue, deal_problems, make_dialogues
from sluice.quickstart.model import make_model, warm_start
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import encode_dialogue, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

SETTINGS = WarmStartSettings(max_hold_steps=8, decay_steps=4, warmup_steps=2)


def dialogues_of(count: int) -> tuple[Dialogue, ...]:
    problems = islice(deal_problems(random.Random(0), TASKS["quickstart"], ()), count)
    return tuple(make_dialogues(problems, random.Random(0), SETTINGS.wrong_step_rate))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(dialogues_of(300))


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[float]:
    losses: list[float] = []
    dialogues = dialogues_of(SETTINGS.max_dialogues)
    warm_start(
        model, tokenizer, dialogues, SETTINGS, lambda _step, _total, loss: losses.append(loss)
    )
    return losses


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    losses = train(make_model(tokenizer, 0), tokenizer)
    assert len(losses) == 12
    assert losses[-1] < 0.6 * losses[0]


def test_the_same_seed_gives_the_same_weights(tokenizer: Tokenizer) -> None:
    models = [make_model(tokenizer, 0), make_model(tokenizer, 0)]
    for model in models:
        train(model, tokenizer)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_model_is_the_tiny_qwen3_and_leaves_the_global_random_state(
    tokenizer: Tokenizer,
) -> None:
    state = torch.get_rng_state()
    model = make_model(tokenizer, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert 100_000 < model.num_parameters() < 150_000
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_the_loss_is_the_mean_over_answer_tokens_alone(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 0)
    settings = WarmStartSettings(max_hold_steps=0, decay_steps=1, batch_dialogues=5)
    dialogues = dialogues_of(5)
    log_likelihoods: list[float] = []
    for prompt, answer in (encode_dialogue(tokenizer, dialogue) for dialogue in dialogues):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        log_likelihoods += [
            float(logits[len(prompt) + place - 1, token]) for place, token in enumerate(answer)
        ]
    losses: list[float] = []
    warm_start(
        model, tokenizer, dialogues, settings, lambda _step, _total, loss: losses.append(loss)
    )
    assert losses == [pytest.approx(-sum(log_likelihoods) / len(log_likelihoods), rel=1e-5)]


def test_too_few_dialogues_are_refused(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 0)
    with pytest.raises(ValueError, match="the dialogues ran out after 2 steps"):
        warm_start(model, tokenizer, dialogues_of(40), SETTINGS, lambda *_: None)
