"""A checkpoint says nothing about ranks: a run goes on with another number of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from services.trainer.learner.ranks.parallel import DataParallel
from services.trainer.learner.worker import Learner
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config, save_model

Numbers = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def make_learner(parallel: DataParallel, model: Path, actor: Path | None) -> Learner:
    config = make_config(model, optim={"lr": 1e-2, "lr_warmup_steps": 2, "eps": 1e-2})
    learner = Learner(config, parallel, total_steps=6)
    if actor is not None:
        learner.load(actor)
    return learner


def train(learner: Learner, steps: range) -> Numbers:
    metrics = [learner.train_step(make_batch(seed=step), step) for step in steps]
    return metrics, {name: weight.clone() for name, weight in learner.named_weights()}


def save_after_two(learner: Learner, folder: Path) -> None:
    train(learner, range(1, 3))
    if learner._parallel.rank == 0:
        learner.save(folder)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    model, actor = save_model(tmp_path / "model"), tmp_path / "global_step_2" / "actor"
    ((expected, weights),) = on_ranks(
        1, partial(make_learner, model=model, actor=None), partial(train, steps=range(1, 5))
    )
    on_ranks(
        before,
        partial(make_learner, model=model, actor=None),
        partial(save_after_two, folder=actor),
    )
    resumed = on_ranks(
        after,
        partial(make_learner, model=model, actor=actor),
        partial(train, steps=range(3, 5)),
    )
    for found, found_weights in resumed:
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy"):
            assert [one[name] for one in found] == pytest.approx(
                [one[name] for one in expected[2:]], rel=1e-4, abs=1e-5
            ), name
        for name, weight in weights.items():
            torch.testing.assert_close(found_weights[name], weight, atol=1e-5, rtol=1e-5, msg=name)
