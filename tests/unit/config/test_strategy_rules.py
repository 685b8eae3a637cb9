"""What sampling strategies mean for a run is reported before it starts."""

from __future__ import annotations

from sluice.config.check import remarks
from sluice.config.explain import notices
from sluice.config.loading.loader import load_config, settings_of
from sluice.config.run import RunConfig

FILTER = "algorithm.filter_groups"
SOUND = [f"{FILTER}.enable=true", "actor_rollout_ref.rollout.n=16"]


def reported(*overrides: str) -> str:
    return "\n".join(one.text for one in remarks(load_config(None, [*SOUND, *overrides])))


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
    assert len(notices(settings_of({}, keys, "test"))) == 2
    rounds = [*keys, "sluice.sampling.strategy=rounds"]
    assert notices(settings_of({}, rounds, "test")) == []
