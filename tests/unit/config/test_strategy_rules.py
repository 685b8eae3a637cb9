"""What sampling strategies need of the configuration, and what is said about them."""

from __future__ import annotations

import pytest

from sluice.config.check import remarks
from sluice.config.explain import notices
from sluice.config.loading.loader import load_config
from sluice.config.rules.checks import relation_problems
from sluice.config.run import RunConfig

FILTER = "algorithm.filter_groups"
SOUND = [f"{FILTER}.enable=true", "actor_rollout_ref.rollout.n=16"]


def strategy_problems_of(*overrides: str) -> list[str]:
    config = load_config(None, [*SOUND, *overrides])
    return [text for text in relation_problems(config) if "sluice.sampling" in text]


@pytest.mark.parametrize("strategy", ["rounds", "stream", "staged", "memory", "staged_memory"])
def test_every_strategy_runs_with_a_filter_and_on_policy(strategy: str) -> None:
    assert strategy_problems_of(f"sluice.sampling.strategy={strategy}") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=rounds", "sluice.asynchrony.max_staleness=1"], "max_staleness=0"),
        (["strategy=rounds", f"{FILTER}.enable=false"], "filter_groups.enable=true"),
        (["strategy=memory", f"{FILTER}.enable=false"], "nothing to choose"),
        (["strategy=staged", "sluice.sampling.probe_samples=16"], "below 16"),
        (["strategy=staged_memory", "sluice.sampling.probe_samples=1"], "2 or more"),
    ],
)
def test_what_a_strategy_cannot_work_with_is_refused_with_the_remedy(
    overrides: list[str], words: str
) -> None:
    (problem,) = strategy_problems_of(f"sluice.sampling.{overrides[0]}", *overrides[1:])
    assert words in problem
    assert "set" in problem


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{FILTER}.enable=false"],
        ["sluice.asynchrony.max_staleness=3"],
        ["sluice.sampling.probe_samples=64"],
        ["sluice.sampling.strategy=memory", "sluice.sampling.probe_samples=64"],
    ],
)
def test_nothing_is_asked_of_a_strategy_that_does_not_need_it(overrides: list[str]) -> None:
    assert strategy_problems_of(*overrides) == []


def said(*overrides: str) -> str:
    return "\n".join(remarks(load_config(None, [*SOUND, *overrides])))


def test_what_a_strategy_means_for_the_run_is_told_before_it_starts() -> None:
    assert "sampling" not in said("sluice.asynchrony.max_staleness=1")
    assert "sampling" not in said(f"{FILTER}.enable=false")
    fill = "sluice.sampling.on_policy_fill"
    assert "longest answers several times over" in said(f"{fill}=exact")
    assert "are drawn anew by the next policy" in said(f"{fill}=expected")
    waves = said("sluice.sampling.strategy=rounds", "data.gen_batch_size=192")
    assert "waves of 192 prompts, any number for a batch" in waves
    both = said("sluice.sampling.strategy=staged_memory", "sluice.run_dir=runs/x")
    assert "4 of 16 samples are drawn first" in both
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
    assert len(notices(keys)) == 2
    assert notices([*keys, "sluice.sampling.strategy=rounds"]) == []
