"""Loads the run configuration: a YAML file, dotted overrides, references, the schema.

Imports neither torch nor a service, so that a typing mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from sluice.config.expectation import expectation
from sluice.config.interpolation import resolve_references
from sluice.config.overrides import apply_overrides
from sluice.config.problems import raise_problems
from sluice.config.run import RunConfig
from sluice.config.schema import KeyPath, field_types, section_type, unknown_key
from sluice.config.section import Section
from sluice.config.yaml_values import parse_document, parse_scalar
from sluice.errors import ConfigError


def load_config(path: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Reads `path` (or starts from the defaults), applies `overrides`, checks names and types.

    What fields mean to each other is not checked here: see `sluice.config.checks`.

    Args:
        path: YAML file; `None` for the defaults.
        overrides: ``key.path=value`` and the like, applied in order after the file.

    Raises:
        ConfigError: the file cannot be read, or keys or values are wrong: all of them are named,
            each with the path, the value, what was expected and where it came from.
    """
    tree = {} if path is None else _read(path)
    overridden = apply_overrides(tree, overrides, _defaults())
    resolved = resolve_references(overridden, _defaults())
    source = str(path) if path is not None else "built-in defaults"
    if overrides:
        source = f"{source} and overrides"
    raise_problems(list(_structure_problems(resolved, RunConfig, ())), source)
    return msgspec.convert(_without_empty_sections(resolved, RunConfig), RunConfig)


def _read(path: Path) -> Mapping[str, object]:
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
            f"configuration file {path} holds {_shown(document)}; expected sections such as "
            f"{', '.join(field_types(RunConfig))}"
        )
    return document


@cache
def _defaults() -> Mapping[str, object]:
    tree = msgspec.to_builtins(RunConfig())
    assert isinstance(tree, dict)
    return tree


def _structure_problems(
    tree: Mapping[str, object], section: type[Section], prefix: KeyPath
) -> Iterator[str]:
    types = field_types(section)
    for key, value in tree.items():
        path = (*prefix, str(key))
        inner = section_type(types.get(key))
        if key not in types:
            yield unknown_key(path)
        elif inner is None:
            yield from _value_problem(path, value, types[key])
        elif isinstance(value, Mapping):
            yield from _structure_problems(value, inner, path)
        elif value is not None:
            yield f"{'.'.join(path)} = {_shown(value)}: expected keys below it"


def _value_problem(path: KeyPath, value: object, annotation: object) -> Iterator[str]:
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        hint = _hint(value, annotation)
        yield f"{'.'.join(path)} = {_shown(value)}: expected {expectation(annotation)}{hint}"


def _hint(value: object, annotation: object) -> str:
    """The remedy where a value has the right words but the wrong YAML type."""
    wanted = expectation(annotation)
    if isinstance(value, str) and wanted.startswith("true or false"):
        return "; YAML 1.2 knows no other words for them"
    if isinstance(value, int | float) and wanted.startswith("a string"):
        return "; put the value in quotes"
    if isinstance(value, str) and isinstance(parse_scalar(value), int | float):
        return "; write it without quotes"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_empty_sections(
    tree: Mapping[str, object], section: type[Section]
) -> dict[str, object]:
    """Drops sections that YAML shows as null because only their heading was written."""
    result: dict[str, object] = {}
    for key, value in tree.items():
        inner = section_type(field_types(section)[key])
        if inner is None:
            result[key] = value
        elif isinstance(value, Mapping):
            result[key] = _without_empty_sections(value, inner)
    return result
