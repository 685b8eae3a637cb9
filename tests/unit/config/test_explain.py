"""What keys mean, and what becomes of those that a user set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.config.catalogue.table import KeyStatus, catalogue
from sluice.config.explain import explain_key, key_statuses, notices
from sluice.config.loading.keys import is_known, other_spellings
from sluice.config.loading.loader import load_config, read_settings, settings_of
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
        ("global_profiler.global_tool_config.nsys", "global_profiler.global_tool_config"),
    ],
)
def test_a_key_is_explained_in_any_spelling(asked: str, path: str) -> None:
    assert explain_key(asked).path == path


def test_an_explanation_names_the_other_spellings_the_unit_and_the_default() -> None:
    key = explain_key("reward_model.overlong_buffer.len")
    assert "reward_model.overlong_buffer.len" in other_spellings(key.path)
    assert (key.unit, key.default, key.takes) == ("tokens", 0, "an integer >= 0")
    assert explain_key(f"{ROLLOUT}.tensor_model_parallel_size").verl_default == "2"


def test_every_key_explains_itself_under_each_of_its_spellings() -> None:
    for path in catalogue():
        for spelling in (path, *other_spellings(path)):
            assert explain_key(spelling).path == path, spelling


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("data.promt_key", r"did you mean data.prompt_key\?"),
        ("algorithm.kl_ctrl", "is a section; name a key below it: type, kl_coef"),
        ("nothing", "the root knows data, actor_rollout_ref"),
    ],
)
def test_what_is_no_key_is_an_error_that_helps(asked: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        explain_key(asked)


@pytest.mark.parametrize("backend", ["fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel"])
def test_another_backend_of_verls_is_a_notice(backend: str) -> None:
    setting = f"actor_rollout_ref.actor.strategy={backend}"
    load_config(None, [setting])
    assert any("strategy" in str(one) for one in notices(settings_of({}, [setting])))


def test_a_value_that_asks_for_what_happens_anyway_needs_no_notice() -> None:
    quiet = [
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        f"{ROLLOUT}.mode=async",
        f"{ROLLOUT}.multi_stage_wake_up=False",
        f"{ROLLOUT}.free_cache_engine=False",
        "trainer.default_hdfs_dir=null",
        "global_profiler.tool=null",
        "data.train_batch_size=8",
    ]
    assert notices(settings_of({}, quiet)) == []


def test_a_notice_is_one_line_with_the_key_as_written_and_what_happens_instead() -> None:
    (one,) = notices(settings_of({}, [f"{ROLLOUT}.layered_summon=True"]))
    assert one.text == (
        f"{ROLLOUT}.layered_summon = true has no effect: weights are sent in buckets of "
        "sluice.weights.bucket_mb"
    )
    (other,) = notices(settings_of({"critic": {"grad_clip": 0.5}}, []))
    assert (other.rule, other.text) == (
        KeyStatus.MAPPED,
        "critic.grad_clip = 0.5 is read as critic.optim.clip_grad",
    )


@pytest.mark.parametrize("setting", ["ledger_samples_interval_s = 1", "ledger_samples_mb = 64"])
def test_a_key_of_an_older_version_is_accepted_and_noticed(setting: str) -> None:
    override = f"sluice.reward.{setting.replace(' ', '')}"
    load_config(None, [override])
    (one,) = notices(settings_of({}, [override]))
    assert one.text == (
        f"sluice.reward.{setting} has no effect: samples are no longer saved across a restart of "
        "the reward service"
    )


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("rollout.n=4", "actor_rollout_ref.rollout.n decides, as in verl"),
        ("model_engine=veomni", "schedule is cosine with veomni and linear with torchtitan: set "),
        ("critic.veomni.attn_implementation=x", "the keys of critic.fsdp work"),
        ("actor_rollout_ref.actor.megatron.use_remove_padding=false", "rows are always packed"),
        ("rollout.total_rollout_steps=64", "verl also stops after trainer.total_epochs"),
    ],
)
def test_a_notice_says_what_decides(setting: str, text: str) -> None:
    (one,) = notices(settings_of({}, [setting]))
    assert text in one.text


def test_an_engine_that_is_left_out_is_named_where_its_keys_are_set() -> None:
    (one,) = notices(settings_of({}, [f"{ROLLOUT}.gpu_memory_utilization=0.8"]))
    assert one.text.endswith(
        f"is left out: replicas run torch; where verl ran vllm, set {ROLLOUT}.name=vllm"
    )


def test_only_the_staleness_of_the_asynchronous_recipe_has_a_counterpart() -> None:
    threshold, other = notices(
        settings_of({"async_training": {"staleness_threshold": 0.5, "require_batches": 4}}, [])
    )
    assert "sluice.asynchrony.ahead_share=s" in threshold.text
    assert other.text.endswith("has no effect: sluice.asynchrony decides")
    load_config(None, ["++async_training.staleness_threshold=null"])


def test_notices_of_a_launch_come_from_the_file_and_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {use_v1: true, esi_redundant_time: 5}\n", encoding="utf-8")
    found = notices(read_settings(path, ["critic.strategy=megatron"]))
    assert [one.key for one in found] == ["trainer.esi_redundant_time", "critic.strategy"]


def test_every_key_that_was_set_has_a_status() -> None:
    document = {
        "data": {"seed": 1, "tool_config_path": "tools.yaml"},
        "critic": {"grad_clip": 0.5, "strategy": "megatron"},
    }
    assert key_statuses(settings_of(document, [])) == {
        "data.seed": KeyStatus.HONOURED,
        "data.tool_config_path": KeyStatus.REFUSED,
        "critic.grad_clip": KeyStatus.MAPPED,
        "critic.strategy": KeyStatus.NOT_APPLICABLE,
    }


def test_a_value_that_changes_nothing_is_not_counted_as_honoured() -> None:
    lines = [
        "data.seed=null",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "data.tool_config_path=null",
        "actor_rollout_ref.actor.ppo_micro_batch_size=null",
    ]
    settings = settings_of({}, lines)
    statuses = list(key_statuses(settings).values())
    assert statuses == [KeyStatus.HONOURED, *[KeyStatus.NOT_APPLICABLE] * 3]
    assert notices(settings) == []


def test_no_effect_on_speed_or_memory_is_a_figure_that_nobody_here_measured() -> None:
    figure = re.compile(r"\d ?(%|ms\b)|\ba (tenth|third|quarter)\b|several times faster")
    assert [key.path for key in catalogue().values() if figure.search(key.effect)] == []
