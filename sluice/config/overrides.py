"""Command-line overrides in Hydra's notation: ``a.b=v``, ``+a.b=v``, ``++a.b=v``, ``~a.b``."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.config.problems import raise_problems
from sluice.config.schema import KeyPath, annotation_at, unknown_key
from sluice.config.yaml_values import parse_override_value
from sluice.errors import ConfigError

_FORM = re.compile(r"^(?P<mode>\+\+|\+|~)?(?P<path>[^=+~]+)(?P<equals>=)?(?P<value>.*)$", re.DOTALL)
_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*$")
_NOTHING = object()


class OverrideMode(StrEnum):
    """What the sign before the key asks for."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    REMOVE = "~"


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed override; `value` of a removal is the value to be found, or nothing."""

    text: str
    mode: OverrideMode
    path: KeyPath
    value: object


def parse_override(text: str) -> Override:
    """Parses one override.

    Raises:
        ConfigError: not of one of the four forms, or the value is no YAML.
    """
    form = _FORM.match(text.strip())
    path = tuple(form["path"].strip().split(".")) if form else ()
    if form is None or not all(_KEY.match(key) for key in path):
        raise ConfigError(
            f"override {text!r}: write key.path=value (+ or ++ before it), or ~key.path"
        )
    mode = OverrideMode(form["mode"] or "")
    if form["equals"] is None and mode is not OverrideMode.REMOVE:
        raise ConfigError(f"override {text!r}: no value; write {text.strip()}=VALUE")
    value = (
        _NOTHING
        if form["equals"] is None
        else parse_override_value(form["value"].strip(), f"override {text!r}")
    )
    return Override(text, mode, path, value)


def apply_overrides(
    tree: Mapping[str, object], overrides: Sequence[str], defaults: Mapping[str, object]
) -> dict[str, object]:
    """A copy of `tree` with the overrides applied in order; of two for one key the later wins.

    `defaults` are the schema's values, which count as present: ``+`` refuses a key that has a
    value already unless it is null or the new value is a mapping or list (Hydra's rule).

    Raises:
        ConfigError: a malformed override, or unknown keys (all of them are named).
    """
    parsed = [parse_override(text) for text in overrides]
    raise_problems(
        [unknown_key(o.path) for o in parsed if annotation_at(o.path) is None], "overrides"
    )
    result = copy.deepcopy(dict(tree))
    for override in parsed:
        if override.mode is OverrideMode.REMOVE:
            _remove(result, override, defaults)
            continue
        if override.mode is OverrideMode.ADD:
            _refuse_second_value(result, override, defaults)
        _set(result, override)
    return result


def _set(tree: dict[str, object], override: Override) -> None:
    node = tree
    for key in override.path[:-1]:
        inner = node.get(key)
        if not isinstance(inner, dict):
            inner = {}
            node[key] = inner
        node = inner
    node[override.path[-1]] = override.value


def _remove(tree: dict[str, object], override: Override, defaults: Mapping[str, object]) -> None:
    present = _current(tree, override.path, defaults)
    if override.value is not _NOTHING and present != override.value:
        raise ConfigError(
            f"override {override.text!r}: the value is {present!r}, so nothing was removed; "
            f"write ~{'.'.join(override.path)}"
        )
    node: object = tree
    for key in override.path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(override.path[-1], None)


def _refuse_second_value(
    tree: Mapping[str, object], override: Override, defaults: Mapping[str, object]
) -> None:
    present = _current(tree, override.path, defaults)
    if present in (None, _NOTHING) or isinstance(override.value, dict | list):
        return
    key = ".".join(override.path)
    raise ConfigError(
        f"override {override.text!r}: {key} has the value {present!r} already; "
        f"write {key}=VALUE or ++{key}=VALUE"
    )


def _current(tree: Mapping[str, object], path: KeyPath, defaults: Mapping[str, object]) -> object:
    for source in (tree, defaults):
        found = value_at(source, path, _NOTHING)
        if found is not _NOTHING:
            return found
    return _NOTHING


def value_at(tree: Mapping[str, object], path: Sequence[str], otherwise: object) -> object:
    """The value at `path` in nested mappings; `otherwise` where a key is missing."""
    node: object = tree
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return otherwise
        node = node[key]
    return node
