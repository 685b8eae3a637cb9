"""Descriptions, coverage and differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.config.catalogue.table import ABSENT, KeyStatus
from sluice.config.explain import (
    Difference,
    all_keys,
    coverage,
    diff_configs,
    explain_key,
    launch_notices,
    notices,
)
from sluice.config.loading.keys import is_known
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

DATA = Path(__file__).resolve().parents[2] / "data"
VERL_KEYS = [
    line
    for line in (DATA / "verl_keys.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
ROLLOUT = "actor_rollout_ref.rollout"


def test_every_key_of_verl_is_known() -> None:
    assert len(VERL_KEYS) > 700
    assert [key for key in VERL_KEYS if not is_known(tuple(key.split(".")))] == []


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("data.seed", "data.seed"),
        ("reward_model.reward_manager", "reward.reward_manager.name"),
        ("reward.reward_manager", "reward.reward_manager.name"),
        ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.*", f"{ROLLOUT}.engine_kwargs"),
        ("global_profiler.tool", "global_profiler"),
    ],
)
def test_a_key_is_explained_in_any_spelling(asked: str, path: str) -> None:
    assert explain_key(asked).path == path


def test_an_explanation_names_the_other_spellings_the_unit_and_the_default() -> None:
    key = explain_key("reward_model.overlong_buffer.len")
    assert key.asked == "reward_model.overlong_buffer.len"
    assert key.asked in key.spellings
    assert (key.unit, key.default, key.takes) == ("tokens", 0, "an integer >= 0")
    assert explain_key(f"{ROLLOUT}.tensor_model_parallel_size").verl_default == "2"


def test_every_key_explains_itself_under_each_of_its_spellings() -> None:
    for key in all_keys():
        for spelling in (key.path, *key.spellings):
            assert explain_key(spelling).path == key.path, spelling


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("data.promt_key", r"did you mean data.prompt_key\?"),
        ("algorithm.kl_ctrl", "is a section; ask for a key below it: type, kl_coef"),
        ("nothing", "the root knows data, actor_rollout_ref"),
    ],
)
def test_what_is_no_key_is_an_error_that_helps(asked: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        explain_key(asked)


def test_a_value_that_asks_for_what_happens_anyway_needs_no_notice() -> None:
    quiet = [
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.free_cache_engine=False",
        "trainer.default_hdfs_dir=null",
        "global_profiler.tool=null",
        "data.train_batch_size=8",
    ]
    assert notices(quiet) == []


def test_a_notice_is_one_line_with_the_key_as_written_and_what_happens_instead() -> None:
    (one,) = notices([f"{ROLLOUT}.free_cache_engine=True"])
    assert one.text == (
        f"{ROLLOUT}.free_cache_engine=True has no effect: the engine has its own devices and keeps "
        "its cache"
    )
    (other,) = notices([], {"critic": {"grad_clip": 0.5}})
    assert (other.status, other.text) == (
        KeyStatus.MAPPED,
        "critic.grad_clip=0.5 is read as critic.optim.clip_grad",
    )


@pytest.mark.parametrize(
    ("engine", "expected"), [("torch", 0), ("vllm", 0), ("sglang", 0), ("trtllm", 1)]
)
def test_an_engine_that_replicas_cannot_run_is_noticed(engine: str, expected: int) -> None:
    found = notices([f"{ROLLOUT}.name={engine}"])
    assert len(found) == expected
    for one in found:
        assert one.status is KeyStatus.NOT_APPLICABLE
        assert "run torch, vllm, sglang only" in one.text
        assert one.text.endswith(f"set {ROLLOUT}.name=torch")


def test_notices_of_a_launch_come_from_the_file_and_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {use_v1: true, esi_redundant_time: 5}\n", encoding="utf-8")
    found = launch_notices(path, ["critic.strategy=megatron"])
    assert [one.path for one in found] == ["trainer.esi_redundant_time", "critic.strategy"]


def test_coverage_counts_by_status_and_reports_unknown_keys_without_ending(tmp_path: Path) -> None:
    path = tmp_path / "launch.overrides"
    lines = [
        "data.seed=1",
        "critic.grad_clip=0.5",
        "+critic.strategy=megatron",
        "data.tool_config_path=tools.yaml",
        "tainer.device=npu",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = coverage([path])
    assert found.counts == dict.fromkeys(KeyStatus, 1)
    assert found.files[0].keys == {
        "data.seed": KeyStatus.HONOURED,
        "critic.grad_clip": KeyStatus.MAPPED,
        "critic.strategy": KeyStatus.NOT_APPLICABLE,
        "data.tool_config_path": KeyStatus.REFUSED,
    }
    assert found.num_unknown == 1
    assert "did you mean trainer.device?" in found.files[0].unknown[0]
    assert "line 5" in found.files[0].unknown[0]


def test_a_value_that_changes_nothing_is_not_counted_as_honoured(tmp_path: Path) -> None:
    path = tmp_path / "launch.overrides"
    lines = [
        "data.seed=null",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "data.tool_config_path=null",
        "actor_rollout_ref.actor.ppo_micro_batch_size=null",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = coverage([path]).files[0].keys
    assert list(found.values()) == [KeyStatus.HONOURED, *[KeyStatus.NOT_APPLICABLE] * 3]
    assert notices(lines) == []


def test_no_effect_on_speed_or_memory_is_a_figure_that_nobody_here_measured() -> None:
    figure = re.compile(r"\d ?(%|ms\b)|\ba (tenth|third|quarter)\b|several times faster")
    assert [key.path for key in all_keys() if figure.search(key.effect)] == []


def test_coverage_takes_bare_keys_by_their_usual_standing(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    lines = ["data.seed", "reward_model.reward_manager", f"+{ROLLOUT}.engine_kwargs.vllm.*", "sed"]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = coverage([path]).files[0]
    assert found.keys == {
        "data.seed": KeyStatus.HONOURED,
        "reward_model.reward_manager": KeyStatus.MAPPED,
        f"{ROLLOUT}.engine_kwargs.vllm": KeyStatus.HONOURED,
    }
    assert len(found.unknown) == 1


def test_coverage_of_a_yaml_file_names_its_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {sed: 1, seed: 2}\nreward_model: {overlong_buffer: {len: 3}}\n")
    found = coverage([path])
    assert found.files[0].unknown == ("data.sed: unknown key; did you mean data.seed?",)
    assert found.counts[KeyStatus.HONOURED] == found.counts[KeyStatus.MAPPED] == 1


def test_differences_are_the_keys_with_other_values_in_the_order_of_the_schema() -> None:
    free = f"{ROLLOUT}.engine_kwargs"
    left = load_config(None, ["data.seed=1", f"{free}.vllm.a=1", "trainer.nnodes=2"])
    right = load_config(None, ["data.seed=2", "trainer.nnodes=2"])
    assert diff_configs(left, right) == [
        Difference("data.seed", 1, 2, None),
        Difference(f"{free}.vllm", {"a": 1}, ABSENT, ABSENT),
    ]
    assert diff_configs(left, left) == []
    assert [one.path for one in diff_configs(RunConfig(), right)] == ["data.seed", "trainer.nnodes"]
