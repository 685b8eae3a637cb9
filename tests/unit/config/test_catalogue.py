"""The catalogue and the typed schema agree, every row is complete, and its page is current."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec import UNSET

from sluice.config.catalogue.table import CatalogueEntry, KeyStatus, catalogue, spellings
from sluice.config.explain import explain_key
from sluice.config.loading.keys import canonical, find_key, is_section
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig, annotation_at, defaults, known_keys, section_type, value_at
from sluice.errors import ConfigError
from tools import generate_config_docs

LEAVES = [key for key in known_keys() if section_type(annotation_at(key.split("."))) is None]
BESIDE = [entry for entry in catalogue().values() if not entry.in_schema]


def test_every_key_of_the_schema_is_in_the_catalogue_and_the_other_way_round() -> None:
    in_schema = {path for path, entry in catalogue().items() if entry.in_schema}
    assert in_schema == set(LEAVES)


def test_every_description_shows_the_default_of_the_schema() -> None:
    shown = {key.path: key.default for key in catalogue().values()}
    assert {key: value_at(defaults(), key.split("."), UNSET) for key in LEAVES} == {
        key: shown[key] for key in LEAVES
    }


def test_every_key_is_described_with_its_values() -> None:
    for key in catalogue().values():
        assert key.meaning, key.path
        assert key.takes, key.path
        assert key.default is not UNSET, key.path
        assert "typing." not in key.takes, key.path
        assert "<class" not in key.takes, key.path


def test_what_is_not_honoured_says_what_happens_instead() -> None:
    for key in catalogue().values():
        assert bool(key.instead) == (key.status is not KeyStatus.HONOURED), key.path
        assert bool(key.targets) == (key.status is KeyStatus.MAPPED), key.path


def test_mapped_keys_set_keys_of_the_schema() -> None:
    for key in catalogue().values():
        assert set(key.targets) <= set(LEAVES), key.path


@pytest.mark.parametrize("entry", BESIDE, ids=lambda entry: entry.path)
def test_the_default_of_a_key_beside_the_schema_has_its_type(entry: CatalogueEntry) -> None:
    msgspec.convert(entry.default, entry.annotation)


@pytest.mark.parametrize("other", spellings())
def test_every_other_spelling_leads_to_a_key_or_section(other: str) -> None:
    proper = canonical(tuple(other.split(".")))
    assert find_key(proper) is not None or is_section(proper)
    assert canonical(proper) == proper


def test_a_refused_key_may_be_set_to_its_default() -> None:
    for entry in catalogue().values():
        assert not entry.refusal_of(entry.default), entry.path


def test_a_configuration_that_writes_out_every_default_is_the_default() -> None:
    keys = [key for key in catalogue().values() if not key.is_block]
    overrides = [f"++{key.path}={json.dumps(key.default)}" for key in keys]
    assert load_config(None, overrides) == RunConfig()


REFUSED = [entry for entry in catalogue().values() if entry.status is KeyStatus.REFUSED]


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(None, list(overrides))
    return str(raised.value)


def another_value(entry: CatalogueEntry) -> str:
    """A value of the right type that is not the default."""
    if isinstance(entry.default, bool):
        return str(not entry.default)
    if isinstance(entry.default, int | float):
        return str(entry.default + 2)
    return "2" if entry.annotation in (int | None, float | None) else "other"


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.path)
def test_a_refused_key_is_an_error_with_its_reason(entry: CatalogueEntry) -> None:
    found = message(f"++{entry.path}={another_value(entry)}")
    assert f"{entry.path} = " in found
    assert f"is refused: {entry.instead}" in found


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.path)
def test_a_refused_key_may_be_null(entry: CatalogueEntry) -> None:
    if entry.default is None:
        load_config(None, [f"++{entry.path}=null"])


@pytest.mark.parametrize("path", ["pkg://mine.scorer", "file:///mine/scorer.py"])
def test_a_scorer_may_be_named_by_module_or_by_file(path: str) -> None:
    config = load_config(None, [f"custom_reward_function.path={path}"])
    assert config.reward.custom_reward_function.path == path


def test_the_page_has_a_row_for_every_key_and_every_spelling() -> None:
    page = generate_config_docs.page()
    for name in [key.path for key in catalogue().values()] + list(spellings()):
        assert f"| `{name}` |" in page, name


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.megatron.router_replay.mode",
        "actor_rollout_ref.ref.megatron.pad_to_length",
        "critic.megatron.entropy_from_logits_chunk_size",
        "critic.megatron.dynamic_context_parallel",
        "actor_rollout_ref.actor.optim.muon_momentum",
        "critic.optim.use_precision_aware_optimizer",
        "actor_rollout_ref.actor.profiler.finish_hook_ranks",
        "global_profiler.relocate_results",
        "trainer.checkpoint_callback_class",
        "actor_rollout_ref.rollout.router_config_path",
        "actor_rollout_ref.actor.torchtitan.entropy_from_logits_chunk_size",
        "rollout.n",
    ],
)
def test_keys_that_verl_0_9_added_are_known(key: str) -> None:
    assert explain_key(key).meaning


@pytest.mark.parametrize(
    "section",
    ["skip.rollout", "skip.rollout_tq", "skip.async_rollout", "actor_rollout_ref.rollout.skip"],
)
def test_responses_from_a_file_are_refused_and_their_other_settings_accepted(section: str) -> None:
    load_config(None, [f"{section}={{enable:false,dump_dir:dumps,action:repeat}}"])
    assert f"{section}.enable = true is refused" in message(f"{section}.enable=true")


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.sum_pi_squared_checkpointing=true",  # of older versions
        "+actor_rollout_ref.rollout.repetition_penalty=1.05",
        "+actor_rollout_ref.actor.checkpoint.save_lora_only=true",
        "+critic.checkpoint.save_lora_only=true",
    ],
)
def test_keys_that_stand_only_in_the_code_of_verl_are_known(override: str) -> None:
    load_config(None, [override])


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.profiler={discrete:true,all_ranks:false,ranks:null}",
        "actor_rollout_ref.model.gradient_checkpointing_kwargs={activations_checkpoint_method:null}",
        "actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=None",
        "critic.megatron.override_transformer_config=${actor_rollout_ref.actor.megatron.override_transformer_config}",
        "actor_rollout_ref.rollout.use_fire_sampling=false",
        "critic.kl_ctrl={type:fixed,kl_coef:0.001}",
    ],
)
def test_the_values_in_the_files_of_verl_0_4_are_accepted(override: str) -> None:
    load_config(None, [override])
