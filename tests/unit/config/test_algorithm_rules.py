"""What estimators, losses and reference models lead to is reported before the start."""

from __future__ import annotations

import pytest

from sluice.algorithm.registry import BATCH_ESTIMATORS
from sluice.config.check import remarks
from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import relation_problems

SOUND = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=8",
)
ADPO = "algorithm.adv_estimator=adpo"
LONE = "actor_rollout_ref.rollout.n=1"
KL_IN_REWARD, KL_IN_LOSS = (
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        ([], []),
        ([KL_IN_LOSS], ["a reference model is kept"]),
        ([KL_IN_REWARD], ["a reference model is kept"]),
        ([KL_IN_LOSS, KL_IN_REWARD], ["counts twice", "a reference model is kept"]),
        ([ADPO], ["each sets the other"]),
        ([LONE], ["its advantage is its raw reward"]),
        ([LONE, "algorithm.adv_estimator=remax"], []),
        ([LONE, "algorithm.adv_estimator=rloo_vectorized"], []),
    ],
)
def test_what_a_configuration_means_is_reported(overrides: list[str], reported: list[str]) -> None:
    found = remarks(load_config(None, [*SOUND, *overrides]))
    assert len(found) == len(reported)
    assert all(words in remark.text for words, remark in zip(reported, found, strict=True))


NEEDS = {"gdpo": ["algorithm.gdpo_reward_keys=[a]"], "gae": ["critic.enable=true"]}


@pytest.mark.parametrize("estimator", sorted(set(BATCH_ESTIMATORS)))
def test_an_estimator_over_groups_either_refuses_groups_of_one_or_says_what_they_get(
    estimator: str,
) -> None:
    one = [*SOUND, LONE, f"algorithm.adv_estimator={estimator}", *NEEDS.get(estimator, [])]
    config = load_config(None, one)
    texts = [one.text for one in relation_problems(config)]
    refused = any("a group of one has no advantage" in text for text in texts)
    reported = any("nothing to compare with" in one.text for one in remarks(config))
    over_rows = {"gae", "remax", "reinforce_plus_plus"}
    assert (refused, reported).count(True) == (0 if estimator in over_rows else 1)
