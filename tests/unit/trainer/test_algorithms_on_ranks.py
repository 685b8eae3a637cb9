"""Several ranks train like one, with every algorithm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from sluice.config.run import RunConfig
from tests.support.threaded_ranks import on_ranks
from tests.support.tiny_policy import make_batch, make_config, save_model

STEPS = 2
WITHIN_A_MICRO_BATCH = {"adpo/anchored_score_std"}
BY_RANKS = ("timing", "perf/", "global_seqlen/")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"adv_estimator": "gae"}},
    "divergence loss": {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.5}},
    "divergence in the reward": {"algorithm": {"use_kl_in_reward": True}},
    "whitened over the batch": {"algorithm": {"adv_estimator": "reinforce_plus_plus"}},
    "token baselines": {"algorithm": {"adv_estimator": "optimal_token_baseline"}},
    "sequence ratios": {"loss": {"loss_mode": "gspo"}},
    "whole groups": {
        "loss": {"loss_mode": "adpo"},
        "algorithm": {"adv_estimator": "adpo"},
        "actor": {"ppo_micro_batch_size_per_gpu": 8},
    },
    "normalised weights": {
        "correction": {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    },
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def configured(model_folder: Path, changes: dict[str, Any]) -> RunConfig:
    config = make_config(model_folder, **changes.get("actor", {}))
    algorithm, policy = config.algorithm, config.actor_rollout_ref
    correction = structs.replace(algorithm.rollout_correction, **changes.get("correction", {}))
    loss = structs.replace(policy.actor.policy_loss, **changes.get("loss", {}))
    return structs.replace(
        config,
        algorithm=structs.replace(
            algorithm, rollout_correction=correction, **changes.get("algorithm", {})
        ),
        actor_rollout_ref=structs.replace(
            policy,
            actor=structs.replace(policy.actor, policy_loss=loss),
            rollout=structs.replace(policy.rollout, n=4),
        ),
        critic=structs.replace(
            config.critic, fsdp=structs.replace(config.critic.fsdp, dtype="float32")
        ),
    )


def train(learner: Learner) -> tuple[dict[str, float], torch.Tensor]:
    metrics: dict[str, float] = {}
    for step in range(1, STEPS + 1):
        metrics = learner.train_step(make_batch(seed=step), step)
    return metrics, torch.cat([weight.flatten() for _, weight in learner.named_weights()])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_train_like_one(model_folder: Path, name: str) -> None:
    config = configured(model_folder, ALGORITHMS[name])

    def build(parallel: ParallelContext) -> Learner:
        return Learner(config, parallel, total_steps=10)

    expected, weights = train(build(ParallelContext()))
    (first, first_weights), (second, second_weights) = on_ranks(2, build, train)
    assert torch.equal(first_weights, second_weights)
    torch.testing.assert_close(first_weights, weights, atol=2e-5, rtol=1e-4)
    for metric, value in expected.items():
        if not metric.startswith(BY_RANKS) and metric not in WITHIN_A_MICRO_BATCH:
            assert first[metric] == second[metric], metric
            assert first[metric] == pytest.approx(value, rel=2e-3, abs=2e-5, nan_ok=True), metric
    assert math.isfinite(expected["actor/grad_norm"])
