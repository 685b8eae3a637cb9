"""Samples without an advantage: the same training with fewer passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.trainer.learner.learner import Learner
from services.trainer.learner.model import passes
from services.trainer.learner.model.forward import token_outputs
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.update.advantages import zero_advantage_rows
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.run import RunConfig
from sluice.types import TrainBatch
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config, save_model, skipping, uniform

GROUPS, SAMPLES = 6, 4
# The second mini-batch, of the last three groups, keeps a group with an advantage or none.
SOME, MOST, ALL = (1, 4), (0, 1, 3, 4, 5), range(GROUPS)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def train(learner: Learner, *batches: TrainBatch) -> tuple[torch.Tensor, dict[str, float]]:
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = learner.train_step(batch, step)
    return torch.cat([weight.flatten() for _, weight in learner.named_weights()]), metrics


def train_alone(config: RunConfig, *batches: TrainBatch) -> tuple[torch.Tensor, dict[str, float]]:
    return train(Learner(config, ParallelContext(), total_steps=10), *batches)


@pytest.mark.parametrize("groups", [SOME, MOST, ALL], ids=["some", "most", "all"])
@pytest.mark.parametrize(("mode", "epochs"), [("token-mean", 1), ("seq-mean-token-mean", 2)])
def test_skipping_samples_without_an_advantage_changes_no_weight(
    model_folder: Path, groups: tuple[int, ...], mode: str, epochs: int
) -> None:
    # The first batch fills AdamW's moments: weights still move where the second has no gradient.
    batches = make_batch(), uniform(make_batch(seed=1), groups)
    config = make_config(model_folder, loss_agg_mode=mode, ppo_epochs=epochs)
    expected, whole = train_alone(config, *batches)
    weights, metrics = train_alone(skipping(config), *batches)
    torch.testing.assert_close(weights, expected, atol=2e-5, rtol=1e-4)
    assert metrics["actor/skipped_samples"] == len(groups) * SAMPLES
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/mean"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name


def test_skipped_samples_take_no_pass(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []

    def record(*arguments: object, **keywords: object) -> TokenStatistics:
        outputs = token_outputs(*arguments, **keywords)  # type: ignore[arg-type]
        passed.append(outputs.logprobs.numel())
        return outputs

    monkeypatch.setattr(passes, "token_outputs", record)
    batch = uniform(make_batch(), MOST)
    train_alone(skipping(make_config(model_folder, ppo_mini_batch_size=GROUPS)), batch)
    assert sum(passed) == sum(rollout.num_tokens for rollout in batch.groups[2].rollouts)


def test_two_ranks_share_what_is_left_and_train_like_one(model_folder: Path) -> None:
    config = skipping(make_config(model_folder))
    batches = make_batch(), uniform(make_batch(seed=1), MOST)

    def build(parallel: ParallelContext) -> Learner:
        return Learner(config, parallel, total_steps=10)

    expected, alone = train_alone(config, *batches)
    (first, metrics), (second, _) = on_ranks(2, build, lambda learner: train(learner, *batches))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=2e-5, rtol=1e-4)
    assert metrics["actor/skipped_samples"] == alone["actor/skipped_samples"]


def test_nothing_is_skipped_that_was_not_asked_for(model_folder: Path) -> None:
    _, metrics = train_alone(make_config(model_folder), uniform(make_batch(), SOME))
    assert "actor/skipped_samples" not in metrics


def test_an_advantage_that_is_not_finite_is_not_skipped() -> None:
    nan = float("nan")
    advantages = torch.tensor([[0.0, 0.0], [nan, 0.0], [0.0, 1.0], [-0.0, 0.0]])
    assert zero_advantage_rows(advantages, ParallelContext()) == {0, 3}
