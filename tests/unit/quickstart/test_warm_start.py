"""The warm start trains on answers only, repeatably, and lowers the loss within a few steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from sluice.quickstart.model import make_model
from sluice.quickstart.problems import TASKS, deal_problems
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import encode_dialogue, train_tokenizer
from sluice.quickstart.warm_start import learning_rate_share, warm_start
from sluice.quickstart.worked_answers import Dialogue, make_dialogues

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

SETTINGS = WarmStartSettings(num_steps=12, batch_dialogues=16, warmup_steps=2)


def dialogues_of(count: int) -> tuple[Dialogue, ...]:
    problems = deal_problems(random.Random(0), TASKS["quickstart"], count, ())
    return make_dialogues(problems, random.Random(0), 0.25)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(dialogues_of(300))


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> list[float]:
    losses: list[float] = []
    dialogues = dialogues_of(SETTINGS.num_dialogues)
    warm_start(
        model, tokenizer, dialogues, SETTINGS, lambda _step, _total, loss: losses.append(loss)
    )
    return losses


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer) -> None:
    losses = train(make_model(tokenizer, 0), tokenizer)
    assert len(losses) == SETTINGS.num_steps
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
    settings = WarmStartSettings(num_steps=1, batch_dialogues=5)
    dialogues = dialogues_of(5)
    log_likelihoods: list[float] = []
    for prompt, answer in (encode_dialogue(tokenizer, dialogue) for dialogue in dialogues):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        log_likelihoods += [
            float(logits[len(prompt) + place - 1, token]) for place, token in enumerate(answer)
        ]
    loss = warm_start(model, tokenizer, dialogues, settings, lambda *_: None)
    assert loss == pytest.approx(-sum(log_likelihoods) / len(log_likelihoods), rel=1e-5)


def test_the_learning_rate_warms_up_holds_and_decays_to_nearly_nothing() -> None:
    settings = WarmStartSettings(num_steps=100, warmup_steps=10, decay_share=0.7)
    shares = [learning_rate_share(settings, step) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9:31] == [1.0] * 22
    assert shares[65] == pytest.approx(0.5)
    assert shares[99] == pytest.approx(1 / 70)


def test_the_wrong_number_of_dialogues_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="3 dialogues given, 192 are needed"):
        warm_start(make_model(tokenizer, 0), tokenizer, dialogues_of(3), SETTINGS, lambda *_: None)
