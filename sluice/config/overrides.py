"""Command-line overrides in Hydra's notation: ``a.b=v``, ``+a.b=v``, ``++a.b=v``, ``~a.b``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.config.catalogue.entry import ABSENT
from sluice.config.key_lookup import find_key, is_open, is_section
from sluice.config.override_files import OverrideText
from sluice.config.problems import raise_problems
from sluice.config.schema import KeyPath
from sluice.config.settings_tree import SettingsTree, value_at
from sluice.config.spelling import canonical, canonical_leaves
from sluice.config.unknown_keys import unknown_key
from sluice.config.yaml_values import parse_override_value
from sluice.errors import ConfigError

__all__ = ["Override", "OverrideMode", "apply_overrides", "parse_override", "value_at"]

_FORM = re.compile(r"^(?P<mode>\+\+|\+|~)?(?P<path>[^=+~]+)(?P<equals>=)?(?P<value>.*)$", re.DOTALL)
_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*$")


class OverrideMode(StrEnum):
    """What the sign before the key asks for."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    REMOVE = "~"


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed override; `path` as written, `value` of a removal `ABSENT` unless one is given."""

    text: str
    mode: OverrideMode
    path: KeyPath
    value: object
    source: str = ""

    @property
    def where(self) -> str:
        """For errors: file and line, or nothing."""
        return f" ({self.source})" if self.source else ""


def parse_override(text: str, source: str = "") -> Override:
    """Parses one override.

    Raises:
        ConfigError: not of one of the four forms, or the value is no YAML.
    """
    form = _FORM.match(text.strip())
    path = tuple(form["path"].strip().split(".")) if form else ()
    where = f" ({source})" if source else ""
    if form is None or not all(_KEY.match(key) for key in path):
        raise ConfigError(
            f"override {text!r}{where}: write key.path=value (+ or ++ before it), or ~key.path"
        )
    mode = OverrideMode(form["mode"] or "")
    if form["equals"] is None and mode is not OverrideMode.REMOVE:
        raise ConfigError(f"override {text!r}{where}: no value; write {text.strip()}=VALUE")
    value = (
        ABSENT
        if form["equals"] is None
        else parse_override_value(form["value"].strip(), f"override {text!r}{where}")
    )
    return Override(text, mode, path, value, source)


def apply_overrides(
    tree: SettingsTree, overrides: Sequence[OverrideText], defaults: Mapping[str, object]
) -> None:
    """Applies the overrides to `tree` in order; of two for one key the later wins.

    `defaults` are the schema's values, which count as present: ``+`` refuses a key that has a
    value already unless it is null, the new value is a mapping or list (Hydra's rule), or verl
    itself does not know the key by that name.

    Raises:
        ConfigError: a malformed override, or unknown keys (all of them are named).
    """
    parsed = [parse_override(item.text, item.source) for item in overrides]
    raise_problems([problem for o in parsed for problem in _unknown(o)], "overrides")
    for override in parsed:
        if override.mode is OverrideMode.REMOVE:
            _remove(tree, override, defaults)
            continue
        if override.mode is OverrideMode.ADD:
            _refuse_second_value(tree, override, defaults)
        for path, spelled, value in canonical_leaves(override.value, override.path):
            tree.set(path, value, spelled)


def _unknown(override: Override) -> list[str]:
    if override.mode is OverrideMode.REMOVE:
        leaves = [(canonical(override.path), override.path)]
    else:
        leaves = [(p, s) for p, s, _ in canonical_leaves(override.value, override.path)]
    return [
        f"{unknown_key(spelled)}{override.where}"
        for path, spelled in leaves
        if find_key(path) is None and not is_section(path)
    ]


def _remove(tree: SettingsTree, override: Override, defaults: Mapping[str, object]) -> None:
    path = canonical(override.path)
    present = _current(tree, path, defaults)
    if override.value is not ABSENT and present != override.value:
        raise ConfigError(
            f"override {override.text!r}{override.where}: the value is {present!r}, so nothing was "
            f"removed; write ~{'.'.join(override.path)}"
        )
    tree.remove(path)


def _refuse_second_value(
    tree: SettingsTree, override: Override, defaults: Mapping[str, object]
) -> None:
    path = canonical(override.path)
    renamed = path != override.path
    present = _current(tree, path, defaults)
    if present in (None, ABSENT) or isinstance(override.value, dict | list):
        return
    if renamed or is_open(path):
        return
    key = ".".join(override.path)
    raise ConfigError(
        f"override {override.text!r}{override.where}: {key} has the value {present!r} already; "
        f"write {key}=VALUE or ++{key}=VALUE"
    )


def _current(tree: SettingsTree, path: KeyPath, defaults: Mapping[str, object]) -> object:
    for source in (tree.values, defaults):
        found = value_at(source, path, ABSENT)
        if found is not ABSENT:
            return found
    return ABSENT
