"""Sources whose shares or settings do not fit together are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.config.check import remarks
from sluice.config.loading.loader import load_config, read_run
from sluice.config.memory.shape import ModelShape
from sluice.config.memory.training import group_flops
from sluice.config.rules.checks import relation_problems
from sluice.config.rules.sources import source_problems
from sluice.config.sources import largest_n, responses_per_step, source_configs, source_groups
from sluice.config.verl_sizes import own_batch
from sluice.errors import ConfigError

KEY = "sluice.sources"
SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)
MODEL_LEN = "actor_rollout_ref.rollout.max_model_len=9"
GIVEN = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "trainer.total_training_steps=5",
    f"{KEY}.math.files=math.parquet",
    f"{KEY}.math.share=0.75",
    f"{KEY}.code.files=[code.parquet]",
    f"{KEY}.code.share=0.25",
)


def found(*overrides: str) -> list[str]:
    config = load_config(None, [*GIVEN, *overrides])
    return [one.text for one in source_problems(config, relation_problems)]


def test_shares_that_add_up_are_accepted() -> None:
    assert found() == []
    assert source_groups(load_config(None, GIVEN)) == {"math": 12, "code": 4}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{KEY}.math.share=0.5",), "do not add up to 1: 0.5 (math) + 0.25 (code) = 0.75"),
        ((f"{KEY}.math.share=0.5",), "math 0.6667, code 0.3333"),
        ((f"{KEY}.math.share=0.65", f"{KEY}.code.share=0.35"), "5.6 groups"),
        ((f"{KEY}.math.share=0.9", f"{KEY}.code.share=0.1"), "set the share to 0.0625 or 0.125"),
        (("data.train_batch_size=1",), "for 2 sources"),
        (("data.train_files=a.parquet",), "leave sluice.sources out"),
        (("trainer.total_training_steps=null",), "the run has no length"),
        (("sluice.sampling.strategy=rounds",), "a wave is of one source"),
        (("algorithm.use_kl_in_reward=true",), "use_kl_loss and kl_loss_coef"),
        ((f"{KEY}.code.environment=Jars",), "sluice.environment.path"),
        ((f"{KEY}.code.loss_mode=bypass_mode",), "for all sources, or for none"),
        ((f"{KEY}.code.n=1", f"{KEY}.code.adv_estimator=grpo_passk"), f"(in {KEY}.code)"),
        ((f"{KEY}.code.adv_estimator=gae",), "or for none of them"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], expected: str) -> None:
    assert any(expected in problem for problem in found(*overrides)), found(*overrides)


def test_a_name_that_metrics_cannot_carry_is_refused() -> None:
    config = load_config(None, GIVEN)
    config.sluice.sources["a/b"] = config.sluice.sources.pop("code")
    problems = [one.text for one in source_problems(config, relation_problems)]
    assert any("up to 64 letters" in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{KEY}.code.shar=1", f"{KEY}.code.shar = 1 is no key of sluice"),
        (f"{KEY}.code.share=2", f"{KEY}.code.share = 2: expected a number > 0 and <= 1"),
        (f"{KEY}.other.share=0.1", f"{KEY}.other.files is not set"),
        (f"{KEY}.code=3", f"{KEY}.code = 3: expected keys below it"),
    ],
)
def test_a_wrong_key_of_a_source_is_named(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [*GIVEN, override])
    assert expected in str(error.value)


def test_a_source_has_the_settings_of_the_run_but_for_its_own() -> None:
    overrides = (f"{KEY}.code.n=2", f"{KEY}.code.adv_estimator=rloo", "algorithm.gamma=0.5")
    configs = source_configs(load_config(None, [*GIVEN, *overrides]))
    code, math = configs["code"], configs["math"]
    assert (code.actor_rollout_ref.rollout.n, code.algorithm.adv_estimator) == (2, "rloo")
    assert (math.algorithm.adv_estimator, code.algorithm.gamma) == ("grpo", 0.5)
    assert code.data.train_files == ["code.parquet"]


def test_a_file_of_sources_reads_as_overrides_do(tmp_path: Path) -> None:
    text = "sluice:\n  sources:\n    a: {files: ~/a.parquet, share: 1.0, clip_ratio_high: 0.28}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    source = read_run(tmp_path / "run.yaml", []).config.sluice.sources["a"]
    assert (source.files, source.clip_ratio_high) == (str(Path.home() / "a.parquet"), 0.28)


OWN_SIZES = (f"{KEY}.math.n=8", f"{KEY}.code.n=4")


@pytest.mark.parametrize(
    "override",
    ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo_passk"],
)
def test_a_group_size_that_no_source_uses_breaks_no_rule(override: str) -> None:
    config = load_config(None, [*GIVEN, *OWN_SIZES, override])
    assert [one.text for one in relation_problems(config)] == []
    (problem,) = relation_problems(load_config(None, [*GIVEN, OWN_SIZES[0], override]))
    assert f"(in {KEY}.code)" in problem.text


def test_a_broken_rule_that_all_sources_share_is_reported_once() -> None:
    config = load_config(None, [*GIVEN, *OWN_SIZES, "data.max_prompt_length=8", MODEL_LEN])
    (problem,) = relation_problems(config)
    assert (problem.rule, f"(in {KEY}" in problem.text) == ("sampling", False)


def test_groups_of_one_are_noted_at_the_source_that_has_them() -> None:
    config = load_config(None, [*GIVEN, OWN_SIZES[0]])
    assert [one.key for one in remarks(config) if "group of one" in one.text] == [f"{KEY}.code.n"]


def test_the_responses_of_a_step_are_those_of_each_source() -> None:
    config = load_config(None, [*GIVEN, *OWN_SIZES])
    batch = own_batch(config)
    assert responses_per_step(config) == batch.rows == batch.mini_rows == 12 * 8 + 4 * 4
    assert largest_n(config) == 8
    of_sources = {name: group_flops(one, SHAPE) for name, one in source_configs(config).items()}
    mean = (12 * of_sources["math"] + 4 * of_sources["code"]) / 16
    assert group_flops(config, SHAPE) == pytest.approx(mean)


def test_probes_are_noted_among_the_samples_that_each_source_has() -> None:
    staged = ("sluice.sampling.strategy=staged", "sluice.sampling.probe_samples=2")
    config = load_config(None, [*GIVEN, *OWN_SIZES, *staged])
    (text,) = (one.text for one in remarks(config) if "generated first" in one.text)
    assert "2 of 4 or 8 samples are generated first" in text
