"""Finding engines by name."""

from __future__ import annotations

import importlib

import pytest

from services.rollout.engines.embedded.engine import EmbeddedEngine, create
from services.rollout.engines.registry import ENGINES, create_engine
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import ENGINES as ENGINES_THAT_RUN
from sluice.errors import ConfigError


def test_the_configured_engine_is_made() -> None:
    assert isinstance(create_engine(RunConfig()), EmbeddedEngine)


@pytest.mark.parametrize("name", ENGINES)
def test_every_registered_engine_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(ENGINES[name]).create)


def test_a_missing_package_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "torch", "a_package_that_is_not_installed.engine")
    with pytest.raises(ConfigError, match=r"'torch'.*a_package_that_is_not_installed"):
        create_engine(RunConfig())


def test_settings_follow_from_the_run_configuration() -> None:
    settings = create(RunConfig())._settings
    data = RunConfig().data
    assert settings.max_model_len == data.max_prompt_length + data.max_response_length
    assert settings.max_queued == RunConfig().sluice.rollout.max_queued


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sluice.asynchrony.max_staleness=0", True),
        ("sluice.asynchrony.max_staleness=1", False),
        ("sluice.rollout.batch_invariant=false", False),
    ],
)
def test_a_synchronous_run_is_batch_invariant_by_default(override: str, expected: bool) -> None:
    assert create(load_config(None, [override]))._settings.batch_invariant is expected


def test_the_configuration_page_names_the_engines_that_exist() -> None:
    assert set(ENGINES_THAT_RUN) == set(ENGINES)
