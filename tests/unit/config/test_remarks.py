"""What settings mean together is reported before a run starts."""

from __future__ import annotations

import pytest

from sluice.algorithm.registry import BATCH_ESTIMATORS
from sluice.config.check import launch_notes, remarks
from sluice.config.explain import notices
from sluice.config.loading.loader import load_config, read_run, settings_of
from sluice.config.rules.checks import all_problems, relation_problems
from sluice.config.run import RunConfig

SOUND = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=8",
)
LONE = "actor_rollout_ref.rollout.n=1"
KL_IN_REWARD, KL_IN_LOSS = (
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
)


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        ([], []),
        ([KL_IN_LOSS], []),
        ([KL_IN_LOSS, KL_IN_REWARD], ["counts twice"]),
        ([LONE], ["its advantage is its raw reward"]),
        ([LONE, "algorithm.adv_estimator=remax"], []),
        ([LONE, "algorithm.adv_estimator=rloo_vectorized"], []),
    ],
)
def test_what_a_configuration_means_is_reported(overrides: list[str], reported: list[str]) -> None:
    found = remarks(load_config(None, [*SOUND, *overrides]))
    assert len(found) == len(reported)
    assert all(words in remark.text for words, remark in zip(reported, found, strict=True))


def test_keys_of_a_critic_that_no_estimator_trains_are_reported_in_one_note() -> None:
    critic = ["critic.optim.lr=1e-4", "critic.model.path=m", "critic.strategy=fsdp"]

    def found(*overrides: str) -> list[str]:
        given = [*SOUND, *critic, *overrides]
        notes = launch_notes(load_config(None, given), settings_of({}, given))
        return [one.text for one in notes if "no critic" in one.text]

    (note,) = found("algorithm.adv_estimator=grpo")
    assert "critic.optim.lr = 0.0001 has no effect, as 1 more of critic.*" in note
    assert found("algorithm.adv_estimator=gae") == []


def test_keys_of_a_critic_need_an_estimator_that_the_user_chose() -> None:
    def problems(*overrides: str) -> list[str]:
        run = read_run(None, [*SOUND, *overrides])
        found = all_problems(run.config, run.keys, files=False)
        return [one.text for one in found if one.rule == "critic"]

    (problem,) = problems("critic.optim.lr=1e-5")
    assert "critic.optim.lr = 1e-05 without algorithm.adv_estimator" in problem
    assert "set algorithm.adv_estimator=gae to train as verl does" in problem
    for chosen in ("algorithm.adv_estimator=grpo", "critic.enable=false", "critic.enable=true"):
        assert problems("critic.optim.lr=1e-5", chosen) == []
    sources = "{a: {files: a.parquet, share: 1, adv_estimator: grpo}}"
    assert problems("critic.optim.lr=1e-5", f"sluice.sources={sources}") == [], "sources name it"
    sources = "{a: {files: a.parquet, share: 1, adv_estimator: grpo}, b: {files: b, share: 1}}"
    assert len(problems("critic.optim.lr=1e-5", f"sluice.sources={sources}")) == 1, "b does not"


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
    grouped = "group_index" in BATCH_ESTIMATORS[estimator].needs
    assert (refused, reported).count(True) == int(grouped)


FILTER = "algorithm.filter_groups"
FILTERED = [f"{FILTER}.enable=true", "actor_rollout_ref.rollout.n=16"]


def reported(*overrides: str) -> str:
    return "\n".join(one.text for one in remarks(load_config(None, [*FILTERED, *overrides])))


def test_what_a_strategy_means_for_the_run_is_reported_before_it_starts() -> None:
    assert "sampling" not in reported("sluice.asynchrony.max_staleness=1")
    assert "sampling" not in reported(f"{FILTER}.enable=false")
    fill = "sluice.sampling.on_policy_fill"
    assert "longest answers several times" in reported(f"{fill}=exact")
    assert "are sampled again by the next policy" in reported(f"{fill}=expected")
    waves = reported("sluice.sampling.strategy=rounds", "data.gen_batch_size=192")
    assert "waves of 192 prompts, any number for a batch" in waves
    both = reported("sluice.sampling.strategy=staged_memory", "sluice.run_dir=runs/x")
    assert "4 of 16 samples are generated first" in both
    assert "runs/x/reward/prompt_memory.sqlite" in both


def test_waves_are_counted_themselves_and_not_by_the_yield() -> None:
    keys = [f"{FILTER}.max_num_gen_batches=10", "data.gen_batch_size=64"]
    rounds = load_config(None, [*keys, "sluice.sampling.strategy=rounds"])
    assert rounds.algorithm.filter_groups.max_num_gen_batches == 10
    assert rounds.data.gen_batch_size == 64
    assert rounds.algorithm.filter_groups.min_yield == 0.0
    assert load_config(None, keys).algorithm.filter_groups.min_yield > 0.0
    default = RunConfig().algorithm.filter_groups.min_yield
    alone = load_config(None, ["sluice.sampling.strategy=rounds"])
    assert alone.algorithm.filter_groups.min_yield == default


def test_keys_of_waves_are_noticed_only_where_there_are_none() -> None:
    keys = [f"{FILTER}.max_num_gen_batches=10", "data.gen_batch_size=64"]
    assert len(notices(settings_of({}, keys))) == 2
    rounds = [*keys, "sluice.sampling.strategy=rounds"]
    assert notices(settings_of({}, rounds)) == []
