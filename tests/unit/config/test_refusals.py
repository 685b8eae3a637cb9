"""Every key that sluice cannot honour is an error with its reason."""

from __future__ import annotations

import pytest

from sluice.config.catalogue.table import Entry, KeyStatus, catalogue
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError

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


@pytest.mark.parametrize("path", ["pkg://mine.scorer", "file:///mine/scorer.py"])
def test_a_scorer_may_be_named_by_module_or_by_file(path: str) -> None:
    config = load_config(None, [f"custom_reward_function.path={path}"])
    assert config.reward.custom_reward_function.path == path
