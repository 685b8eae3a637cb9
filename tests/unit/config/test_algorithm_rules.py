"""Estimators, losses, critics and corrections that cannot work together are named with a remedy."""

from __future__ import annotations

import pytest

from sluice.algorithm.registry import BATCH_ESTIMATORS
from sluice.config.check import remarks
from sluice.config.loading.loader import load_config
from sluice.config.rules.algorithm import algorithm_problems
from sluice.config.rules.checks import relation_problems

LOSS = "actor_rollout_ref.actor.policy_loss"
CORRECTION = "algorithm.rollout_correction"
SOUND = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=8",
)
ADPO, GAE = "algorithm.adv_estimator=adpo", "algorithm.adv_estimator=gae"
LONE = "actor_rollout_ref.rollout.n=1"
KL_IN_REWARD, KL_IN_LOSS = (
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
)
SKIPPING = "sluice.trainer.skip_zero_advantage=true"


def problems(*overrides: str) -> list[str]:
    return algorithm_problems(load_config(None, [*SOUND, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([ADPO, f"{LOSS}.loss_mode=vanilla"], "set both to adpo or neither"),
        (["algorithm.adv_estimator=grpo", f"{LOSS}.loss_mode=adpo"], "set both to adpo or neither"),
        ([ADPO, f"{CORRECTION}.bypass_mode=true"], "loss_mode = adpo; set bypass_mode=false"),
        (
            [f"{LOSS}.loss_mode=gspo", f"{CORRECTION}.bypass_mode=true"],
            "loss_mode = gspo; set bypass_mode=false",
        ),
        ([GAE, "critic.enable=false"], "set critic.enable=null, or another estimator"),
        (
            [GAE, "critic.ppo_mini_batch_size=24"],
            "no multiple of critic.ppo_mini_batch_size = 24",
        ),
        (
            [
                GAE,
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
                "critic.use_dynamic_bsz=false",
            ],
            "critic.ppo_micro_batch_size_per_gpu = null",
        ),
        (["algorithm.adv_estimator=gdpo"], "name the values of the scorer"),
        (
            ["algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1.0]"],
            "1 entries for 2",
        ),
        ([f"{LOSS}.loss_mode=dro"], "dro_beta = null with loss_mode = dro"),
        ([f"{CORRECTION}.rollout_is_threshold=2_0.5"], "the lower bound is above the upper"),
        ([f"{CORRECTION}.rollout_rs=token_k9"], "rollout_rs = 'token_k9': expected one or more"),
        ([f"{CORRECTION}.rollout_rs=token_k1"], "rollout_rs_threshold = None: expected one"),
        ([f"{CORRECTION}.rollout_rs_threshold=2.0"], "has no effect while rollout_rs is null"),
        ([SKIPPING, KL_IN_LOSS], "or use_kl_loss=false"),
        ([SKIPPING, KL_IN_REWARD], "or use_kl_in_reward=false"),
        ([SKIPPING, "actor_rollout_ref.actor.entropy_coeff=0.01"], "or entropy_coeff=0"),
        ([SKIPPING, GAE], "or critic.enable=false"),
        ([SKIPPING, f"{LOSS}.loss_mode=kl_cov"], "loss_mode = kl_cov: that loss reads samples"),
        ([SKIPPING, ADPO], "loss_mode = adpo: that loss reads samples"),
        (
            [SKIPPING, "actor_rollout_ref.actor.calculate_entropy=true"],
            "or calculate_entropy=false",
        ),
        ([SKIPPING, "algorithm.adv_estimator=reinforce_plus_plus"], "hardly any is 0"),
        (
            [SKIPPING, "algorithm.adv_estimator=optimal_token_baseline"],
            "or another estimator, such as grpo",
        ),
        (
            [
                SKIPPING,
                f"{CORRECTION}.rollout_is=token",
                f"{CORRECTION}.rollout_is_batch_normalize=true",
            ],
            "or rollout_is_batch_normalize=false",
        ),
        (
            [
                SKIPPING,
                "algorithm.adv_estimator=opo",
                f"{CORRECTION}.rollout_rs=token_k2",
                f"{CORRECTION}.rollout_rs_threshold=1",
            ],
            "rollout_rs = token_k2 and algorithm.adv_estimator = opo: advantages or weights come",
        ),
    ],
)
def test_what_does_not_go_together_is_named_with_its_remedy(
    overrides: list[str], named: str
) -> None:
    (found,) = problems(*overrides)
    assert named in found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [ADPO],
        [GAE],
        [GAE, "critic.enable=true"],
        [KL_IN_REWARD, KL_IN_LOSS],
        [f"{LOSS}.loss_mode=dro", f"{LOSS}.dro_beta=0.1"],
        [f"{CORRECTION}.bypass_mode=true"],
        [SKIPPING],
        [SKIPPING, f"{CORRECTION}.bypass_mode=true"],
        [f"{LOSS}.loss_mode=bypass_mode", f"{CORRECTION}.bypass_mode=true"],
        [f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'", f"{CORRECTION}.rollout_rs_threshold=2"],
    ],
)
def test_what_goes_together_is_let_through(overrides: list[str]) -> None:
    assert problems(*overrides) == []


def test_the_groups_of_adpo_are_those_that_are_drawn() -> None:
    other = "algorithm.num_generations=4"
    (found,) = relation_problems(load_config(None, [*SOUND, ADPO, other]))
    assert "algorithm.num_generations = 4 differs from" in found
    assert relation_problems(load_config(None, [*SOUND, other])) == []


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        ([], []),
        ([KL_IN_LOSS], ["a reference model is kept"]),
        ([KL_IN_REWARD], ["a reference model is kept"]),
        ([KL_IN_LOSS, KL_IN_REWARD], ["counts twice", "a reference model is kept"]),
        ([ADPO], ["each sets the other"]),
        ([LONE], ["advantages are made of the raw rewards"]),
        ([LONE, "algorithm.adv_estimator=remax"], []),
        ([LONE, "algorithm.adv_estimator=rloo_vectorized"], []),
    ],
)
def test_what_a_configuration_leads_to_is_told(overrides: list[str], reported: list[str]) -> None:
    found = remarks(load_config(None, [*SOUND, *overrides]))
    assert len(found) == len(reported)
    assert all(words in remark for words, remark in zip(reported, found, strict=True))


NEEDS = {"gdpo": ["algorithm.gdpo_reward_keys=[a]"], "gae": ["critic.enable=true"]}


@pytest.mark.parametrize("estimator", sorted(set(BATCH_ESTIMATORS)))
def test_an_estimator_over_groups_either_refuses_groups_of_one_or_says_what_they_get(
    estimator: str,
) -> None:
    one = [*SOUND, LONE, f"algorithm.adv_estimator={estimator}", *NEEDS.get(estimator, [])]
    config = load_config(None, one)
    refused = any("a group of one has no" in text for text in relation_problems(config))
    reported = any("nothing to be compared with" in text for text in remarks(config))
    over_rows = {"gae", "remax", "reinforce_plus_plus"}
    assert (refused, reported).count(True) == (0 if estimator in over_rows else 1)
