"""What sluice cannot do is an error with the reason; a wrong type is an error everywhere."""

from __future__ import annotations

import pytest

from sluice.config.catalogue.table import Entry, KeyStatus, catalogue
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFUSED = [entry for entry in catalogue().values() if entry.status is KeyStatus.REFUSED]


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(None, list(overrides))
    return str(raised.value)


def another_value(entry: Entry) -> str:
    """A value of the right type that is not the default."""
    if isinstance(entry.default, bool):
        return str(not entry.default)
    if isinstance(entry.default, int | float):
        return str(entry.default + 2)
    return "2" if entry.annotation in (int | None, float | None) else "other"


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.path)
def test_a_refused_key_is_an_error_with_its_reason(entry: Entry) -> None:
    found = message(f"++{entry.path}={another_value(entry)}")
    assert f"{entry.path} = " in found
    assert f"is refused: {entry.instead}" in found


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.path)
def test_a_refused_key_may_be_null(entry: Entry) -> None:
    if entry.default is None:
        load_config(None, [f"++{entry.path}=null"])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"{ACTOR}.kl_loss_type=full", "needs the whole distribution"),
        (f"{ROLLOUT}.pipeline_model_parallel_size=2", "engines run without pipeline stages"),
        ("data.train_files=hdfs://data/train.parquet", "nothing is fetched from HDFS"),
        ("data.val_files=['a.parquet','hdfs://b.parquet']", "nothing is fetched from HDFS"),
        ("actor_rollout_ref.model.path=hdfs://model", "nothing is fetched from HDFS"),
        ("trainer.resume_from_path=hdfs://run/global_step_1", "nothing is read from"),
        ("reward_model.reward_manager=batch", "write a scorer for one response"),
        ("trainer.logger=['console','clearml']", "no logger clearml"),
        (f"{ACTOR}.optim.optimizer=muon", "AdamW is the only optimizer"),
        (f"{ACTOR}.optim.lr_decay_style=WSD", "constant, linear, cosine or inverse_square_root"),
    ],
)
def test_a_value_that_cannot_be_had_is_refused_with_the_reason(override: str, reason: str) -> None:
    found = message(override)
    assert override.partition("=")[0] in found
    assert reason in found


@pytest.mark.parametrize("path", ["pkg://mine.scorer", "file:///mine/scorer.py"])
def test_a_scorer_may_be_named_by_module_or_by_file(path: str) -> None:
    config = load_config(None, [f"custom_reward_function.path={path}"])
    assert config.reward.custom_reward_function.path == path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{ACTOR}.megatron.tensor_model_parallel_size=two", "= 'two': expected an integer"),
        (f"{ACTOR}.fsdp_config.param_offload=1", "= 1: expected true or false"),
        (f"{ROLLOUT}.mode=sometimes", "expected one of async, sync"),
        (f"{ROLLOUT}.gpu_memory_utilization=1.5", "expected a number > 0 and <= 1"),
        ("trainer.v1.trainer_mode=later", "expected one of sync, colocate_async, separate_async"),
        (f"{ACTOR}.checkpoint.save_contents=[weights]", "one of model, optimizer, extra, hf_model"),
        ("reward_model.overlong_buffer.len=long", "reward_model.overlong_buffer.len = 'long'"),
        (
            f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=half",
            "expected one of full, selective or null",
        ),
        (f"{ACTOR}.megatron=2", f"{ACTOR}.megatron = 2: expected keys below it"),
        ("data.seed=None", "an integer or null; the word for nothing is null"),
        ("algorithm.kl_penalty=k9", "expected one of kl, k1"),
    ],
)
def test_a_wrong_type_names_the_key_as_written_the_value_and_what_was_expected(
    override: str, expected: str
) -> None:
    assert expected in message(override)


@pytest.mark.parametrize(
    "override",
    [
        f"+{ROLLOUT}.engine_kwargs.vllm.enable_expert_parallel=True",
        f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3",
        f"+{ACTOR}.megatron.override_transformer_config.moe_new_switch=True",
        f"+{ACTOR}.optim.override_optimizer_config.new_switch=0.5",
        f"+{ACTOR}.megatron.override_ddp_config.bucket_size=1",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "+reward.reward_kwargs.new_argument=1",
        "+custom_reward_function.reward_kwargs.strict=True",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    ],
)
def test_any_key_may_be_added_below_an_open_one(override: str) -> None:
    load_config(None, [override])


@pytest.mark.parametrize(
    "override",
    [
        f"+{ACTOR}.new_switch=1",
        f"+{ACTOR}.megatron.new_size=2",
        "+trainer.new_switch=1",
        "+reward_model.new_switch=1",
        "+new_section.switch=1",
        f"+{ACTOR}.policy_loss.new_constant=1",
    ],
)
def test_an_unknown_key_stays_unknown_with_a_plus(override: str) -> None:
    assert "unknown key" in message(override)


def test_an_unknown_key_in_a_mapping_is_named_with_its_whole_path() -> None:
    assert "critic.optim.lrr: unknown key; did you mean critic.optim.lr?" in message(
        "critic={optim: {lrr: 1}}"
    )
