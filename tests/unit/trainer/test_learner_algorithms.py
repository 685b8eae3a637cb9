"""Every configured algorithm trains: estimators, losses, divergence, correction, critic."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from services.trainer.learner.learner import Learner
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.registry import BATCH_ESTIMATORS, POLICY_OBJECTIVES
from sluice.config.run import RunConfig
from sluice.errors import CheckpointError
from sluice.types import Rollout, Scored, TrainBatch
from tests.support.domain_values import with_turn
from tests.support.tiny_policy import make_batch, make_config, save_model, uniform

CUT_DEPENDENT = {"geo_mean", "clip_cov", "kl_cov"}  # defined over the micro-batch, as in verl


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def configured(
    model_folder: Path,
    *,
    algorithm: dict[str, object] | None = None,
    correction: dict[str, object] | None = None,
    policy_loss: dict[str, object] | None = None,
    critic: dict[str, object] | None = None,
    critic_warmup: int = 0,
    **actor: Any,
) -> RunConfig:
    config = make_config(model_folder, 4, **{"ppo_micro_batch_size_per_gpu": 16, **actor})
    section = structs.replace(
        config.algorithm,
        rollout_correction=structs.replace(
            config.algorithm.rollout_correction, **(correction or {})
        ),
        **(algorithm or {}),
    )
    policy = config.actor_rollout_ref
    loss = structs.replace(policy.actor.policy_loss, **(policy_loss or {}))
    optim = structs.replace(config.critic.optim, lr=0.05)
    fp32 = structs.replace(config.critic.fsdp, dtype="float32")
    return structs.replace(
        config,
        algorithm=section,
        actor_rollout_ref=structs.replace(
            policy,
            actor=structs.replace(policy.actor, policy_loss=loss),
            rollout=structs.replace(policy.rollout, n=4),
        ),
        critic=structs.replace(config.critic, optim=optim, fsdp=fp32, **(critic or {})),
        trainer=structs.replace(config.trainer, critic_warmup=critic_warmup),
    )


def train(config: RunConfig, *batches: TrainBatch) -> tuple[Learner, dict[str, float]]:
    learner = Learner(config, ParallelContext(), total_steps=10)
    metrics: dict[str, float] = {}
    for step, batch in enumerate(batches, start=1):
        metrics = learner.train_step(batch, step)
    return learner, metrics


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


def with_baselines(batch: TrainBatch, reward: float = 0.5) -> TrainBatch:
    groups = tuple(replace(group, baseline_reward=reward) for group in batch.groups)
    return replace(batch, groups=groups)


@pytest.mark.parametrize("name", sorted(BATCH_ESTIMATORS))
def test_every_estimator_trains(model_folder: Path, name: str) -> None:
    algorithm: dict[str, object] = {"adv_estimator": name}
    if name == "gdpo":
        algorithm["gdpo_reward_keys"] = ["acc"]
    config = configured(model_folder, algorithm=algorithm)
    _, metrics = train(config, with_baselines(make_batch(4)))
    assert metrics["actor/grad_norm"] > 0.0
    assert math.isfinite(metrics["critic/advantages/mean"])
    assert ("critic/vf_loss" in metrics) == (name == "gae")
    assert metrics.get("critic/loss") == metrics.get("critic/vf_loss")
    assert ("gdpo/acc/mean" in metrics) == (name == "gdpo")


@pytest.mark.parametrize("name", sorted(POLICY_OBJECTIVES))
def test_every_loss_trains_and_does_not_depend_on_the_cut(model_folder: Path, name: str) -> None:
    loss: dict[str, object] = {"loss_mode": name, "dro_beta": 0.1}
    cuts: list[dict[str, Any]] = [
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 10_000},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 50},
    ]
    whole, expected = train(configured(model_folder, policy_loss=loss, **cuts[0]), make_batch(4))
    assert expected["actor/grad_norm"] > 0.0
    if name in CUT_DEPENDENT:
        return
    pieces, metrics = train(configured(model_folder, policy_loss=loss, **cuts[1]), make_batch(4))
    for weight_name, weight in weights_of(whole).items():
        torch.testing.assert_close(
            weights_of(pieces)[weight_name], weight, atol=2e-5, rtol=1e-4, msg=weight_name
        )
    assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-3, abs=1e-6)


def test_remax_compares_each_reward_with_the_greedy_responses(model_folder: Path) -> None:
    config = configured(model_folder, algorithm={"adv_estimator": "remax"})
    _, metrics = train(config, with_baselines(make_batch(4), 0.5))  # rewards are -1 and 1
    found = {name: metrics[f"critic/{name}"] for name in ("advantages/max", "advantages/min")}
    assert found == {"advantages/max": 0.5, "advantages/min": -1.5}
    assert (metrics["critic/returns/max"], metrics["critic/returns/min"]) == (1.0, -1.0)


def test_the_divergence_from_the_reference_is_0_before_the_first_step(model_folder: Path) -> None:
    config = configured(model_folder, use_kl_loss=True, kl_loss_coef=0.1, ppo_mini_batch_size=4)
    learner, metrics = train(config, make_batch(4))
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/kl_coef"] == 0.1
    assert learner.train_step(make_batch(4, seed=1), 2)["actor/kl_loss"] > 0.0


def test_a_heavy_divergence_penalty_keeps_the_policy_near_its_reference(
    model_folder: Path,
) -> None:
    batches = [make_batch(4, seed=seed) for seed in range(2)]
    distances = []
    for coef in (0.0, 50.0):
        config = configured(model_folder, use_kl_loss=True, kl_loss_coef=coef, ppo_epochs=2)
        _, metrics = train(config, *batches)
        distances.append(metrics["actor/kl_loss"])
    assert distances[1] < 0.5 * distances[0]


def test_divergence_in_the_reward_moves_its_coefficient_and_survives_a_checkpoint(
    model_folder: Path, tmp_path: Path
) -> None:
    controller = {"type": "adaptive", "kl_coef": 0.5, "horizon": 100}
    base = make_config(model_folder).algorithm.kl_ctrl
    config = configured(
        model_folder,
        algorithm={"use_kl_in_reward": True, "kl_ctrl": structs.replace(base, **controller)},
    )
    learner, metrics = train(config, make_batch(4), make_batch(4, seed=1))
    # 16 rows below the target: the coefficient falls by 0.2 * 16 / 100 a batch.
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.032))
    assert metrics["critic/score/mean"] != metrics["critic/rewards/mean"]
    learner.save(tmp_path / "actor")
    resumed, _ = train(config)
    resumed.load(tmp_path / "actor")
    continued = resumed.train_step(make_batch(4, seed=2), 3)
    assert continued == pytest.approx(
        {**learner.train_step(make_batch(4, seed=2), 3), **_timings(continued)}, nan_ok=True
    )


def test_a_resumed_run_takes_a_fixed_divergence_coefficient_from_its_configuration(
    model_folder: Path, tmp_path: Path
) -> None:
    base = make_config(model_folder).algorithm.kl_ctrl
    saved, resumed = (
        train(
            configured(
                model_folder,
                algorithm={
                    "use_kl_in_reward": True,
                    "kl_ctrl": structs.replace(base, kl_coef=coef),
                },
            )
        )[0]
        for coef in (0.5, 0.25)
    )
    saved.save(tmp_path / "actor")
    resumed.load(tmp_path / "actor")
    assert resumed.train_step(make_batch(4), 1)["actor/reward_kl_penalty_coeff"] == 0.25


def test_only_an_adaptive_divergence_coefficient_needs_the_file_that_old_checkpoints_lack(
    model_folder: Path, tmp_path: Path
) -> None:
    fixed, _ = train(configured(model_folder))
    fixed.save(tmp_path / "actor")
    (tmp_path / "actor" / "kl_control.json").unlink()
    fixed.load(tmp_path / "actor")

    kl_ctrl = structs.replace(make_config(model_folder).algorithm.kl_ctrl, type="adaptive")
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl}
    adaptive, _ = train(configured(model_folder, algorithm=algorithm))
    remedy = r"kl_control\.json cannot be read .* or set algorithm\.kl_ctrl\.type=fixed"
    with pytest.raises(CheckpointError, match=remedy):
        adaptive.load(tmp_path / "actor")


def _timings(metrics: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if n.startswith(("timing", "perf/"))}


def test_the_critic_learns_the_returns(model_folder: Path) -> None:
    config = configured(
        model_folder, algorithm={"adv_estimator": "gae"}, critic={"cliprange_value": 100.0}
    )
    learner = Learner(config, ParallelContext(), total_steps=60)
    losses = [learner.train_step(make_batch(4), step)["critic/vf_loss"] for step in range(1, 7)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_policy_waits_until_the_critic_is_warm(model_folder: Path) -> None:
    config = configured(model_folder, algorithm={"adv_estimator": "gae"}, critic_warmup=3)
    learner = Learner(config, ParallelContext(), total_steps=10)
    before = weights_of(learner)
    for step in (1, 2):
        assert "actor/grad_norm" not in learner.train_step(make_batch(4), step)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(learner).items())
    assert learner.train_step(make_batch(4), 3)["actor/grad_norm"] > 0.0


def test_a_critic_is_saved_and_resumed_with_the_policy(model_folder: Path, tmp_path: Path) -> None:
    config = configured(model_folder, algorithm={"adv_estimator": "gae"})
    learner, _ = train(config, make_batch(4))
    learner.save(tmp_path / "actor")
    resumed, _ = train(config)
    resumed.load(tmp_path / "actor")
    expected, found = (one.train_step(make_batch(4, seed=1), 2) for one in (learner, resumed))
    for name in ("critic/vf_loss", "critic/values/mean", "actor/grad_norm"):
        assert found[name] == expected[name]


def test_a_checkpoint_without_a_critic_is_refused_by_a_run_with_one(
    model_folder: Path, tmp_path: Path
) -> None:
    train(configured(model_folder))[0].save(tmp_path / "actor")
    learner, _ = train(configured(model_folder, algorithm={"adv_estimator": "gae"}))
    with pytest.raises(CheckpointError, match=r"saved without a critic; set critic\.enable=false"):
        learner.load(tmp_path / "actor")


def test_rejected_tokens_do_not_train(model_folder: Path) -> None:
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.0001}
    config = configured(model_folder, correction=correction, ppo_mini_batch_size=4)
    far = _with_behavior(make_batch(4), -60.0)
    _, metrics = train(config, far)
    assert metrics["actor/grad_norm"] == 0.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0


def test_rejected_tokens_leave_the_mask_before_the_advantages(model_folder: Path) -> None:
    batch = make_batch(4)
    groups = [replace(group, rollouts=_far_tails(group.rollouts)) for group in batch.groups]
    tailed = replace(batch, groups=tuple(groups))
    heads = [[r.num_tokens - _TAIL for r in group.rollouts] for group in groups]
    rewards = [[scored.reward for scored in group.scores] for group in groups]
    config = configured(
        model_folder, algorithm={"adv_estimator": "opo"}, correction=_REJECTS_FAR_TOKENS
    )
    _, metrics = train(config, tailed)
    expected = [
        reward - np.average(of_group, weights=lengths)
        for of_group, lengths in zip(rewards, heads, strict=True)
        for reward in of_group
    ]
    assert metrics["critic/advantages/mean"] == pytest.approx(
        np.average(expected, weights=[n for lengths in heads for n in lengths]), abs=1e-6
    )
    assert metrics["critic/advantages/max"] == pytest.approx(max(expected), abs=1e-6)


def test_remax_gives_nothing_for_a_reward_on_a_rejected_token(model_folder: Path) -> None:
    batch = make_batch(4)
    groups = [replace(group, rollouts=_far_tails(group.rollouts)) for group in batch.groups]
    config = configured(
        model_folder, algorithm={"adv_estimator": "remax"}, correction=_REJECTS_FAR_TOKENS
    )
    _, metrics = train(config, with_baselines(replace(batch, groups=tuple(groups))))
    assert (metrics["critic/returns/min"], metrics["critic/returns/max"]) == (0.0, 0.0)
    assert metrics["critic/advantages/mean"] == pytest.approx(-0.5)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae"])
def test_a_batch_whose_tokens_are_all_rejected_trains_nothing_and_ends_no_run(
    model_folder: Path, name: str
) -> None:
    config = configured(
        model_folder, algorithm={"adv_estimator": name}, correction=_REJECTS_FAR_TOKENS
    )
    _, metrics = train(config, _with_behavior(make_batch(4), -60.0))
    norms = [value for metric, value in metrics.items() if metric.endswith("grad_norm")]
    assert norms == [0.0] * (2 if name == "gae" else 1)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_neither_policy_nor_critic_learns_from_rejected_responses(
    model_folder: Path, name: str
) -> None:
    config = configured(
        model_folder, algorithm={"adv_estimator": name}, correction=_REJECTS_FAR_TOKENS
    )
    batch = make_batch(4)
    far = _with_behavior(batch, -60.0).groups[2:]
    half = replace(batch, groups=(*batch.groups[:2], *far))
    other = uniform(half, range(2, 4))  # other rewards, on rejected responses only
    expected, found = train(config, half)[1], train(config, other)[1]
    learnt = {n for n in expected if n.endswith(("vf_loss", "pg_loss", "grad_norm"))}
    assert len(learnt) == (4 if name == "gae" else 2)
    for metric in learnt:
        assert found[metric] == pytest.approx(expected[metric], rel=1e-5), metric


def test_normalised_importance_weights_have_mean_1(model_folder: Path) -> None:
    plain = configured(model_folder, ppo_mini_batch_size=4)
    correction = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    normalised = configured(model_folder, correction=correction, ppo_mini_batch_size=4)
    far = _with_behavior(make_batch(4), -60.0)  # every weight is the threshold
    expected, found = train(plain, far)[1], train(normalised, far)[1]
    assert found["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-4)
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx(2.0)


def test_bypass_mode_takes_the_engines_logprobs_for_the_old_ones(model_folder: Path) -> None:
    bypass = configured(model_folder, correction={"bypass_mode": True})
    by_hand = configured(model_folder, use_rollout_log_probs=True)
    one, other = train(bypass, make_batch(4))[1], train(by_hand, make_batch(4))[1]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_the_bypass_loss_alone_corrects_like_bypass_mode(model_folder: Path) -> None:
    correction = {"rollout_is": "token", "loss_type": "reinforce"}
    named = configured(
        model_folder, correction=correction, policy_loss={"loss_mode": "bypass_mode"}
    )
    switched = configured(model_folder, correction={**correction, "bypass_mode": True})
    one, other = train(named, make_batch(4))[1], train(switched, make_batch(4))[1]
    assert one["actor/grad_norm"] == other["actor/grad_norm"]
    assert one["rollout_corr/rollout_is_mean"] == other["rollout_corr/rollout_is_mean"]


def test_what_bypass_mode_reports_does_not_depend_on_the_cut(model_folder: Path) -> None:
    correction = {"bypass_mode": True, "rollout_is": "sequence", "rollout_is_threshold": "0.9_1.1"}
    rejection = {"rollout_rs": "seq_sum_k1,token_k3", "rollout_rs_threshold": "1.05,0.001"}
    cuts: list[dict[str, Any]] = [
        {"ppo_max_token_len_per_gpu": 4096},
        {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1},
    ]
    whole, cut = (
        train(
            configured(
                model_folder, correction={**correction, **rejection}, ppo_mini_batch_size=4, **one
            ),
            make_batch(4),
        )[1]
        for one in cuts
    )
    names = [name for name in whole if name.startswith("rollout_corr/")]
    assert "rollout_corr/rollout_is_max" in names
    expected = {name: whole[name] for name in names}
    assert {name: cut[name] for name in names} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_token_baselines_weigh_energies_with_the_importance_weights(model_folder: Path) -> None:
    algorithm: dict[str, object] = {"adv_estimator": "optimal_token_baseline"}
    plain = configured(model_folder, algorithm=algorithm)
    weighted = configured(model_folder, algorithm=algorithm, correction={"rollout_is": "token"})
    one, other = (train(config, make_batch(4))[1] for config in (plain, weighted))
    assert one["critic/advantages/mean"] != other["critic/advantages/mean"]


@pytest.mark.parametrize(("scale", "largest"), [(True, 1.5), (False, 0.75)])
def test_adpo_divides_by_the_deviation_only_where_asked(
    model_folder: Path, scale: bool, largest: float
) -> None:
    algorithm: dict[str, object] = {"adv_estimator": "adpo", "norm_adv_by_std_in_grpo": scale}
    config = configured(model_folder, algorithm=algorithm)
    groups = tuple(
        replace(group, scores=tuple(Scored(r, r, {}) for r in (1.0, 0.0, 0.0, 0.0)))
        for group in make_batch(4).groups
    )
    _, metrics = train(config, replace(make_batch(4), groups=groups))
    assert metrics["critic/advantages/max"] == pytest.approx(largest)


def test_the_policys_schedule_begins_with_its_first_update(model_folder: Path) -> None:
    config = configured(
        model_folder,
        algorithm={"adv_estimator": "gae"},
        critic_warmup=2,
        optim={"lr": 0.5, "lr_warmup_steps": 4},
    )
    learner = Learner(config, ParallelContext(), total_steps=10)
    found = [learner.train_step(make_batch(2), step).get("actor/lr") for step in range(1, 4)]
    assert found == [None, 0.0, 0.125]


def test_off_policy_metrics_are_there_without_any_correction(model_folder: Path) -> None:
    _, metrics = train(configured(model_folder), make_batch(4))
    assert math.isfinite(metrics["rollout_corr/kl"])
    assert math.isfinite(metrics["rollout_corr/k3_kl"])


_TAIL = 1
_REJECTS_FAR_TOKENS: dict[str, object] = {
    "rollout_rs": "token_k2",
    "rollout_rs_threshold": 100.0,
}


def _far_tails(rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """Return the same responses; in each, only the last token is rejected."""
    found = []
    for rollout in rollouts:
        logprobs = rollout.behavior_logprobs.copy()
        logprobs[-_TAIL:] = -60.0
        found.append(with_turn(rollout, behavior_logprobs=logprobs))
    return tuple(found)


def _with_behavior(batch: TrainBatch, logprob: float) -> TrainBatch:
    groups = tuple(
        replace(
            group,
            rollouts=tuple(
                with_turn(r, behavior_logprobs=np.full(r.num_tokens, logprob, np.float32))
                for r in group.rollouts
            ),
        )
        for group in batch.groups
    )
    return replace(batch, groups=groups)
