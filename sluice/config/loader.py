"""Loads the run configuration: a YAML file, dotted overrides, references, the schema.

Imports neither torch nor a service, so that a typing mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from sluice.config.conversions import convert_settings
from sluice.config.interpolation import resolve_references
from sluice.config.key_lookup import find_key
from sluice.config.override_files import expand_overrides, is_override_file
from sluice.config.overrides import apply_overrides
from sluice.config.problems import raise_problems
from sluice.config.run import RunConfig
from sluice.config.schema import field_types
from sluice.config.settings_tree import SettingsTree, tree_of
from sluice.config.structure import shown, structure_problems
from sluice.config.value_words import translate_words
from sluice.config.yaml_values import parse_document
from sluice.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Reads `path` (or starts from the defaults), applies `overrides`, checks names and types.

    Every key of verl is accepted, in old and new spellings; `sluice.config.explain.notices` says
    what becomes of those that are mapped or have no effect. What fields mean to each other is not
    checked here: see `sluice.config.checks`.

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
    """What a file and overrides set, in sluice's spelling, references resolved, types unchecked.

    Raises:
        ConfigError: as `load_config`, except for types and refused values.
    """
    if path is not None and is_override_file(path):
        return settings_of({}, [f"@{str(path).removeprefix('@')}", *overrides], str(path))
    return settings_of({} if path is None else read_document(path), overrides, str(path))


def settings_of(
    document: Mapping[str, object], overrides: Sequence[str], source: str
) -> SettingsTree:
    """The same for mappings that were read already; `source` names them in errors."""
    tree = tree_of(document, source)
    apply_overrides(tree, expand_overrides(overrides), defaults())
    return resolve_references(tree, defaults())


def read_document(path: Path) -> Mapping[str, object]:
    """The mapping in a YAML file; empty for an empty file.

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


@cache
def defaults() -> Mapping[str, object]:
    """The schema's defaults as nested mappings."""
    tree = msgspec.to_builtins(RunConfig())
    assert isinstance(tree, dict)
    return tree


def _schema_part(settings: SettingsTree) -> dict[str, object]:
    """The values that the schema holds; those of other keys, checked and converted, are left."""
    kept = SettingsTree()
    for path, value in settings.leaves():
        found = find_key(path)
        if found is not None and found.in_schema:
            kept.set(path, value, path)
    return kept.values
