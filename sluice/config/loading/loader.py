"""Load the run configuration: a YAML file, dotted overrides, references, the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sluice.config.loading.conversions import convert_settings, translate_words
from sluice.config.loading.field_checks import structure_problems
from sluice.config.loading.keys import find_key
from sluice.config.loading.overrides import apply_overrides, expand_overrides, is_override_file
from sluice.config.loading.references import resolve_references
from sluice.config.loading.settings_tree import SettingsTree, tree_of
from sluice.config.loading.yaml_text import parse_document
from sluice.config.problems import raise_problems, shown
from sluice.config.run import RunConfig, defaults, field_types, value_at
from sluice.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Read `path` (or start from the defaults), apply `overrides`, check names and types.

    Every key of verl is accepted, in old and new spellings; `sluice.config.explain.notices` reports
    those that are mapped or have no effect. Rules between fields are in `sluice.config.rules`.

    Args:
        path: YAML file, or a file of overrides; `None` for the defaults.
        overrides: ``key.path=value`` and the like, or names of files of them (``@file``), applied
            in order after the file.

    Raises:
        ConfigError: the file cannot be read, or keys or values are wrong: all of them are named,
            each with the path, the value, what was expected and where it came from.
    """
    source = str(path) if path is not None else "built-in defaults"
    if overrides:
        source = f"{source} and overrides"
    settings = read_settings(path, overrides)
    translate_words(settings)
    raise_problems(structure_problems(settings), source)
    convert_settings(settings, defaults())
    raise_problems(structure_problems(settings), f"{source}, converted")
    return msgspec.convert(_schema_part(settings), RunConfig)


def read_settings(path: Path | None, overrides: Sequence[str]) -> SettingsTree:
    """Return what a file and overrides set, in sluice's spelling, references resolved.

    Raises:
        ConfigError: as `load_config`, except for types and refused values.
    """
    if path is not None and is_override_file(path):
        return settings_of({}, [f"@{str(path).removeprefix('@')}", *overrides], str(path))
    return settings_of({} if path is None else read_document(path), overrides, str(path))


def settings_of(
    document: Mapping[str, object], overrides: Sequence[str], source: str
) -> SettingsTree:
    """Return the same for a mapping that was read already; `source` names it in errors."""
    tree = tree_of(document, source)
    apply_overrides(tree, expand_overrides(overrides), defaults())
    return resolve_references(tree, defaults())


def read_document(path: Path) -> Mapping[str, object]:
    """Return the mapping in a YAML file; empty for an empty file.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"configuration file {path} does not exist; give the path of a YAML file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    document = parse_document(text, str(path))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"configuration file {path} holds {shown(document)}; expected sections such as "
            f"{', '.join(field_types(RunConfig))}"
        )
    return document


def _schema_part(settings: SettingsTree) -> dict[str, object]:
    """Return the values that the schema holds; others were checked and converted before."""
    kept = SettingsTree()
    for path, value in settings.leaves():
        found = find_key(path)
        if found is not None and found.in_schema:
            kept.set(path, value, path)
    return kept.values


class KeySettings:
    """Values by dotted key, from the typed configuration, else as the user set them.

    The typed configuration lacks keys that mean nothing to sluice, such as Megatron's sizes; verl's
    rules and the memory estimate need them all the same.
    """

    def __init__(self, config: RunConfig, as_set: Mapping[str, object] | None = None) -> None:
        self._typed: Mapping[str, object] = msgspec.to_builtins(config)
        self._as_set = as_set or {}

    def is_set(self, *keys: str) -> bool:
        """Return whether the user gave one of these keys a value other than null."""
        return any(self._as_set.get(key) is not None for key in keys)

    def value(self, *keys: str) -> object:
        """Return the value of the first of these keys that has one; `None` if none has."""
        for source in (self._in_schema, self._as_set.get):
            for key in keys:
                found = source(key)
                if found is not None:
                    return found
        return None

    def whole(self, *keys: str, otherwise: int) -> int:
        """Return a whole number; `otherwise` where none is set."""
        found = self.whole_or_none(*keys)
        return otherwise if found is None else found

    def whole_or_none(self, *keys: str) -> int | None:
        """Return a whole number, or `None`."""
        found = self.value(*keys)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def number(self, *keys: str, otherwise: float) -> float:
        """Return a number; `otherwise` where none is set."""
        found = self.value(*keys)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        return otherwise

    def flag(self, *keys: str, otherwise: bool) -> bool:
        """Return true or false; `otherwise` where neither is set."""
        found = self.value(*keys)
        return found if isinstance(found, bool) else otherwise

    def text(self, *keys: str, otherwise: str) -> str:
        """Return a text; `otherwise` where none is set."""
        found = self.value(*keys)
        return found if isinstance(found, str) else otherwise

    def _in_schema(self, key: str) -> object:
        return value_at(self._typed, key.split("."), None)


def keys_as_set(file: Path | None, overrides: Sequence[str]) -> dict[str, object]:
    """Return every key that a file or the overrides set, dotted, in sluice's spelling.

    Raises:
        ConfigError: as `load_config` does for names and references.
    """
    return read_settings(file, overrides).by_key()
