"""Numbers that follow from the configuration."""

from __future__ import annotations

import pytest

from sluice.config import derived
from sluice.config.check import check_report
from sluice.config.loading.loader import load_config, read_settings
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.run import RunConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def config_with(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            "data.train_batch_size=64",
            f"{ROLLOUT}.n=8",
            f"{ACTOR}.ppo_mini_batch_size=32",
            "data.max_prompt_length=40",
            "data.max_response_length=56",
            *overrides,
        ],
    )


def test_rows_and_mini_batches_follow_from_prompts() -> None:
    config = config_with()
    assert derived.rows_per_batch(config) == 512


def test_lengths_default_to_the_data_limits_and_yield_to_their_own_keys() -> None:
    config = config_with()
    assert (derived.max_model_len(config), derived.max_resp_len(config)) == (96, 56)
    chosen = config_with(f"{ROLLOUT}.max_model_len=128", "reward.reward_kwargs.max_resp_len=50")
    assert (derived.max_model_len(chosen), derived.max_resp_len(chosen)) == (128, 50)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), False),
        (("enable=true",), True),
        (("enable=true", "prompt_template='Question: {question}'"), True),
        (("enable=true", "prompt_template='Answer: {response}'"), False),
    ],
)
def test_a_reward_model_reads_the_question_that_its_template_holds(
    overrides: tuple[str, ...], *, expected: bool
) -> None:
    config = config_with(*(f"reward.reward_model.{override}" for override in overrides))
    assert derived.reads_question(config.reward) is expected


@pytest.mark.parametrize(
    ("staleness", "chosen", "expected"),
    [(0, "null", True), (1, "null", False), (0, "false", False), (2, "true", True)],
)
def test_batch_invariance_defaults_to_the_synchronous_mode(
    staleness: int, chosen: str, expected: bool
) -> None:
    config = config_with(
        f"sluice.asynchrony.max_staleness={staleness}", f"sluice.rollout.batch_invariant={chosen}"
    )
    assert derived.batch_invariant(config) is expected


@pytest.mark.parametrize(
    ("engine", "batch_invariant", "chosen", "expected"),
    [
        ("torch", "null", "null", "exact"),
        ("torch", "false", "null", "expected"),
        ("vllm", "null", "null", "expected"),
        ("vllm", "true", "null", "exact"),
        ("torch", "null", "expected", "expected"),
        ("torch", "true", "expected", "expected"),
        ("vllm", "null", "exact", "exact"),
    ],
)
def test_batches_on_policy_are_filled_exactly_where_the_engine_repeats_its_samples(
    engine: str, batch_invariant: str, chosen: str, expected: str
) -> None:
    config = config_with(
        f"{ROLLOUT}.name={engine}",
        f"sluice.rollout.batch_invariant={batch_invariant}",
        f"sluice.sampling.on_policy_fill={chosen}",
    )
    assert derived.on_policy_fill(config) == expected


def test_an_engine_need_not_repeat_its_samples_for_batches_that_do_not() -> None:
    reported = "sluice.sampling.on_policy_fill=expected"
    assert derived.batch_invariant(config_with())
    assert not derived.batch_invariant(config_with(reported))
    assert derived.batch_invariant(config_with(reported, "sluice.rollout.batch_invariant=true"))


def test_the_length_of_the_run_counts_full_batches_over_all_epochs() -> None:
    config = config_with("trainer.total_epochs=3")
    assert derived.total_training_steps(config, dataset_rows=100) == 4
    assert derived.total_training_steps(config_with("trainer.total_training_steps=7"), 100) == 7


def test_the_checkpoint_folder_lies_in_the_run_folder_unless_named() -> None:
    assert derived.checkpoint_folder(config_with("sluice.run_dir=r")) == "r/checkpoints"
    assert derived.checkpoint_folder(config_with("trainer.default_local_dir=c")) == "c"


def test_the_numbers_of_a_check_are_shown_as_verl_and_as_sluice_would_have_them() -> None:
    overrides = [
        "trainer.nnodes=4",
        "trainer.n_gpus_per_node=16",
        "data.train_batch_size=64",
        f"{ROLLOUT}.n=16",
        f"{ACTOR}.ppo_mini_batch_size=32",
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    ]
    config = load_config(None, overrides)
    as_set = read_settings(None, overrides)
    report = check_report(config, as_set, dataset_rows=1000, files=False)
    numbers = {one.name: (one.as_verl, one.here) for one in report.quantities}
    assert numbers == {
        "trainer ranks": (64, 64),
        "data-parallel size D": (16, 16),
        "responses per step": (1024, 1024),
        "responses per rank": (64, 64),
        "mini-batch responses": (512, 512),
        "normalised mini-batch": (32, 32),
        "accumulation steps": (8, 8),
        "optimizer steps per train batch": (2, 2),
        "responses per generation round": (1024, None),
        "old-policy logprob micro-batches": (8, 16),
        "steps of the run": (450, 468),
        "steps per epoch, nothing filtered": (15, 15),
    }


def test_a_token_budget_leaves_the_number_of_micro_batches_open() -> None:
    config = config_with(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.use_kl_loss=true")
    report = check_report(config, SettingsTree(), files=False)
    open_ones = {one.name for one in report.quantities if one.as_verl is None}
    assert open_ones == {
        "accumulation steps",
        "old-policy logprob micro-batches",
        "reference logprob micro-batches",
    }
