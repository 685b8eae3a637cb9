"""Which values of a configuration file the words of a command replace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sluice.config.catalogue.entry import ABSENT
from sluice.config.loader import defaults, read_document
from sluice.config.override_files import expand_overrides, is_override_file
from sluice.config.overrides import apply_overrides
from sluice.config.settings_tree import SettingsTree, tree_of
from sluice.config.structure import shown


def replaced_values(path: Path | None, overrides: Sequence[str]) -> list[str]:
    """A line for every key that the file sets and the overrides set otherwise.

    A deployment adds settings of its own, which whoever wrote the file has not seen.

    Args:
        path: of the file; `None`: there is none, and nothing is replaced.
        overrides: as of `load_config`.

    Raises:
        ConfigError: as `read_settings`.
    """
    if path is None:
        return []
    tree = _tree(path)
    before = dict(tree.leaves())
    apply_overrides(tree, expand_overrides(overrides), defaults())
    after = dict(tree.leaves())
    return [
        f"{'.'.join(key)}={shown(value)} of {path} is not heeded: the command {_described(now)}"
        for key, value in before.items()
        if (now := after.get(key, ABSENT)) != value
    ]


def _described(value: object) -> str:
    return "removes it" if value is ABSENT else f"says {shown(value)}"


def _tree(path: Path) -> SettingsTree:
    if not is_override_file(path):
        return tree_of(read_document(path), str(path))
    tree = SettingsTree()
    apply_overrides(tree, expand_overrides([f"@{str(path).removeprefix('@')}"]), defaults())
    return tree
