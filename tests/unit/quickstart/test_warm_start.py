"""The supervised warm start and its learning rate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from sluice.quickstart.arithmetic import TASKS, Dialogue, deal_problems, make_dialogues
from sluice.quickstart.lessons import lesson_of, warm_start_row
from sluice.quickstart.model import (
    HoldThenDecay,
    QuickstartModel,
    WarmStartRow,
    make_model,
    slip_entropy,
    warm_start,
)
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import train_tokenizer

SCHEDULE = WarmStartSettings(
    warmup_steps=10, hold_until_excess_loss=0.1, max_hold_steps=200, decay_steps=20
)


def run(losses: list[float]) -> tuple[HoldThenDecay, list[float]]:
    """The schedule after these losses, repeated without end, and every step's share."""
    schedule = HoldThenDecay(SCHEDULE)
    shares: list[float] = []
    while not schedule.done:
        shares.append(schedule.share)
        schedule.advance(losses[min(len(shares), len(losses)) - 1])
    return schedule, shares


def test_the_rate_warms_up_holds_and_decays_in_equal_steps() -> None:
    _, shares = run([1.0])
    assert len(shares) == 220
    assert shares[:10] == pytest.approx([share / 10 for share in range(1, 11)])
    assert shares[10:201] == [1.0] * 191
    assert shares[200:] == pytest.approx([share / 20 for share in range(20, 0, -1)])


def test_the_hold_ends_when_the_mean_of_25_losses_is_low_enough() -> None:
    schedule, shares = run([1.0] * 50 + [0.0])
    # The 25 last losses hold two of 1.0 (mean 0.08) after 23 of 0.0.
    assert schedule.num_steps == len(shares) == 50 + 23 + 20


def test_a_single_low_loss_does_not_end_the_hold() -> None:
    schedule = HoldThenDecay(SCHEDULE)
    schedule.advance(0.0)
    assert schedule.num_steps == 220


def test_losses_that_rise_again_do_not_resume_the_hold() -> None:
    schedule, _ = run([0.0] * 25 + [9.0])
    assert schedule.num_steps == 45


@pytest.mark.parametrize(
    ("rate", "nats"), [(0.0, 0.0), (0.5, math.log(2)), (0.25, 0.5623351), (1.0, 0.0)]
)
def test_slips_leave_the_entropy_of_a_biased_coin(rate: float, nats: float) -> None:
    assert slip_entropy(rate) == pytest.approx(nats)


if TYPE_CHECKING:
    from tokenizers import Tokenizer

SETTINGS = WarmStartSettings(max_hold_steps=8, decay_steps=4, warmup_steps=2)


def dialogues_of(count: int) -> tuple[Dialogue, ...]:
    problems = islice(deal_problems(random.Random(0), TASKS["quickstart"], ()), count)
    return tuple(make_dialogues(problems, random.Random(0), SETTINGS.wrong_step_rate))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(dialogues_of(300))


def rows_of(tokenizer: Tokenizer, count: int) -> Iterator[WarmStartRow]:
    entropy = slip_entropy(SETTINGS.wrong_step_rate)
    lessons = (lesson_of(dialogue, entropy) for dialogue in dialogues_of(count))
    return (warm_start_row(tokenizer, lesson) for lesson in lessons)


def train(model: QuickstartModel, tokenizer: Tokenizer) -> list[float]:
    losses: list[float] = []
    rows = rows_of(tokenizer, SETTINGS.max_dialogues)
    warm_start(model, rows, SETTINGS, lambda one: losses.append(one.loss or 0.0))
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
    rows = list(rows_of(tokenizer, 5))
    log_likelihoods: list[float] = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        log_likelihoods += [
            float(logits[place - 1, token])
            for place, token in enumerate(row.token_ids)
            if row.is_answer[place]
        ]
    losses: list[float] = []
    warm_start(model, rows, settings, lambda one: losses.append(one.loss or 0.0))
    assert losses == [pytest.approx(-sum(log_likelihoods) / len(log_likelihoods), rel=1e-5)]


def test_too_few_dialogues_are_refused(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, 0)
    with pytest.raises(ValueError, match="the dialogues ran out after 2 steps"):
        warm_start(model, rows_of(tokenizer, 40), SETTINGS, lambda *_: None)
