"""The optimizer follows the schedule that the configuration asks for."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer.learner.model.optimizer import PolicyOptimizer
from sluice.config.loading.loader import load_config

OPTIM = "actor_rollout_ref.actor.optim"


def rates(*overrides: str, steps: int = 9, total: int = 8) -> list[float]:
    config = load_config(None, [f"{OPTIM}.lr=1.0", *(f"{OPTIM}.{one}" for one in overrides)])
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = PolicyOptimizer({"w": weight}, config.actor_rollout_ref.actor.optim, total)
    return [optimizer.begin_batch(step) for step in range(steps)]


def test_the_number_of_waves_reaches_the_cosine_schedule() -> None:
    once, twice = rates("lr_scheduler_type=cosine"), rates("warmup_style=cosine", "num_cycles=1")
    assert once[4] == pytest.approx(0.5)
    assert (once[8], twice[4], twice[8]) == pytest.approx((0.0, 0.0, 1.0))


@pytest.mark.parametrize("key", ["lr_scheduler_type", "lr_decay_style"])
def test_the_inverse_square_root_is_asked_for_in_either_spelling(key: str) -> None:
    found = rates(f"{key}=inverse_square_root", "lr_warmup_steps=2")
    assert found[:3] == [0.0, 0.5, 1.0]
    assert found[8] == pytest.approx(math.sqrt(2 / 8))


def test_a_length_of_its_own_takes_the_place_of_the_runs() -> None:
    assert rates("lr_scheduler_type=linear", "total_training_steps=4")[4] == 0.0
    assert rates("lr_scheduler_type=linear")[4] == pytest.approx(0.5)
