"""The configuration of a run's folder as dotted keys, and where configurations differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.config.loading.yaml_files import read_document
from sluice.config.loading.yaml_text import flat_settings, flat_tree
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.safe_text import without_secrets
from sluice.service_contract import CONFIG_NAME

_RUN = "RUN"
_RUN_DIR = "sluice.run_dir"
# Of a start, not of a run: the ports are chosen at each.
_OF_A_START = (_RUN_DIR, ".port")


def run_settings(run_dir: Path) -> dict[str, str]:
    """Return every value of the run's configuration by its dotted key, as text.

    The run's own folder is written as ``RUN``. Without a readable file there are no settings.
    """
    try:
        document = read_document(run_dir / CONFIG_NAME)
    except (ConfigError, OSError):
        return {}
    flat = flat_tree(document)
    # Where it is, and where it was when it started: a run may be copied.
    folders = [str(run_dir.absolute()), str(flat.get(_RUN_DIR, run_dir))]
    return {key: _text(value, folders) for key, value in without_secrets(flat).items()}


def settings_object(run_dir: Path) -> dict[str, Any]:
    """Return the settings, each with its default (null: it has none), and whether it differs."""
    defaults = {key: _text(value) for key, value in flat_settings(RunConfig()).items()}
    return {
        "settings": [
            {
                "key": key,
                "value": value,
                "default": defaults.get(key),
                "is_changed": value != defaults.get(key) and not key.endswith(_OF_A_START),
            }
            for key, value in run_settings(run_dir).items()
        ]
    }


def differences(settings: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ: ``key``, and ``values`` of each run (null: not set)."""
    keys = dict.fromkeys(key for one in settings for key in one)
    rows = ((key, [one.get(key) for one in settings]) for key in keys)
    return [
        {"key": key, "values": values}
        for key, values in rows
        if len(set(values)) > 1 and not key.endswith(_OF_A_START)
    ]


def _text(value: object, folders: Sequence[str] = ()) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one, folders) for one in value)}]"
    text = str(value)
    for folder in folders:
        if text.startswith(f"{folder}/"):
            return f"{_RUN}{text.removeprefix(folder)}"
    return text
