"""Load the run configuration: a YAML file, dotted overrides, references, the schema."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice.config.catalogue.table import catalogue
from sluice.config.loading.conversions import convert_settings, translate_words
from sluice.config.loading.keys import KeyPath, find_key, is_section, unknown_key
from sluice.config.loading.override_values import parse_word
from sluice.config.loading.overrides import apply_overrides, expand_overrides, is_override_file
from sluice.config.loading.settings_tree import SettingsTree, resolve_references, tree_of
from sluice.config.loading.yaml_files import read_document
from sluice.config.loading.yaml_text import parse_scalar
from sluice.config.problems import Problem, raise_problems
from sluice.config.run import (
    RunConfig,
    defaults,
    element_section,
    expectation,
    field_types,
    value_at,
    value_section,
)
from sluice.config.schema.section import Section


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
    run = read_run(path, overrides)
    raise_problems(run.problems, run.source)
    return run.config


@dataclass(frozen=True, slots=True)
class ReadRun:
    """A configuration as it was read.

    Attributes:
        config: the configuration, with defaults in place of wrong keys and values.
        settings: the keys as the user set them, without the wrong ones.
        problems: the problems with unknown keys, overrides, references, types and refused values.
        source: where it came from, for messages.
    """

    config: RunConfig
    settings: SettingsTree
    problems: tuple[Problem, ...]
    source: str

    @property
    def keys(self) -> KeySettings:
        """The values by key."""
        return KeySettings(self.config, self.settings.by_key())


def read_run(path: Path | None, overrides: Sequence[str]) -> ReadRun:
    """Read a configuration as `load_config` does, but return the problems of keys and values, so
    that rules can be applied to the rest.

    Raises:
        ConfigError: a file cannot be read.
    """
    source = str(path) if path is not None else "built-in defaults"
    if overrides:
        source = f"{source} and overrides"
    settings = read_settings(path, overrides)
    values = SettingsTree(copy.deepcopy(settings.values), dict(settings.spelled))
    translate_words(values)
    wrong = remove_invalid(values)
    conflicts = convert_settings(values, defaults())
    wrong += remove_invalid(values)
    for path_of_key, _ in wrong:
        settings.remove(path_of_key)
    problems = (*settings.problems, *(problem for _, problem in wrong), *conflicts)
    config = msgspec.convert(_schema_part(values), RunConfig)
    return ReadRun(config, settings, problems, source)


def read_settings(path: Path | None, overrides: Sequence[str]) -> SettingsTree:
    """Return the settings of a file and overrides, in sluice's spelling, with references resolved.

    Raises:
        ConfigError: as `read_run`.
    """
    if path is not None and is_override_file(path):
        return settings_of({}, [f"@{str(path).removeprefix('@')}", *overrides])
    return settings_of({} if path is None else read_document(path), overrides)


def settings_of(document: Mapping[str, object], overrides: Sequence[str]) -> SettingsTree:
    """Return the same for a mapping that was read already."""
    tree = tree_of(document)
    apply_overrides(tree, expand_overrides(overrides, tree.problems), defaults())
    return resolve_references(tree, defaults())


def _schema_part(settings: SettingsTree) -> dict[str, object]:
    """Return the values that the schema holds; others were checked and converted before."""
    part = SettingsTree()
    for path, value in settings.leaves():
        entry = find_key(path)
        if entry is not None and entry.in_schema:
            part.set(path, value, path)
    return part.values


class KeySettings:
    """Values by dotted key: from the typed configuration, as the user set them, or the default.

    The typed configuration lacks keys that mean nothing to sluice, such as Megatron's sizes; but
    verl's rules and the memory estimate need them.
    """

    def __init__(self, config: RunConfig, as_set: Mapping[str, object] | None = None) -> None:
        self._typed: Mapping[str, object] = msgspec.to_builtins(config)
        self._as_set = as_set or {}

    def of(self, config: RunConfig) -> KeySettings:
        """Return the same as the user set them, in another typed configuration."""
        return KeySettings(config, self._as_set)

    def is_set(self, key: str) -> bool:
        """Return whether the user gave the key a value other than null."""
        return self._as_set.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the user wrote null."""
        return self._as_set.get(key, msgspec.UNSET) is None

    def set_below(self, section: str) -> dict[str, object]:
        """Return what the user set in a section, without nulls, by key."""
        items = self._as_set.items()
        return {k: v for k, v in items if k.startswith(f"{section}.") and v is not None}

    def value(self, key: str) -> object:
        """Return the value of a key of the catalogue; `None` if it is null."""
        typed = value_at(self._typed, key.split("."), self._as_set.get(key))
        return catalogue()[key].default if typed is None else typed

    def integer(self, key: str) -> int:
        """Return the value of a key that takes whole numbers and is not null by default."""
        number = self.integer_or_none(key)
        assert number is not None
        return number

    def integer_or_none(self, key: str) -> int | None:
        """Return the value of a key that takes whole numbers or null."""
        number = self.value(key)
        assert number is None or isinstance(number, int)
        return number

    def flag(self, key: str) -> bool:
        """Return the value of a key that takes true and false; null counts as false."""
        return self.value(key) is True


def remove_invalid(tree: SettingsTree) -> list[tuple[KeyPath, Problem]]:
    """Remove every unknown key, wrong type and refused value; return each with its problem, in the
    user's spelling."""
    wrong = [
        (path, problem)
        for path, value in tree.leaves()
        for problem in _leaf_problems(tree, path, value)
    ]
    for path, _ in wrong:
        tree.remove(path)
    return wrong


def _leaf_problems(tree: SettingsTree, path: KeyPath, value: object) -> Iterator[Problem]:
    entry, spelling = find_key(path), tree.spelling(path)
    if entry is None:
        if not is_section(path):
            yield unknown_key(tuple(spelling.split(".")))
        elif value is not None:
            yield Problem(spelling, value, ": expected keys below it")
        return
    if entry.path == ".".join(path):
        refusal = entry.refusal_of(value)
        if refusal:
            yield Problem(spelling, value, f"is refused: {refusal}")
            return
    yield from _type_problems(spelling, value, entry.annotation)


def _type_problems(spelling: str, value: object, annotation: object) -> Iterator[Problem]:
    element = element_section(annotation)
    if element is not None and isinstance(value, list):
        yield from _element_problems(spelling, value, element)
        return
    inner = value_section(annotation)
    if inner is not None and isinstance(value, Mapping):
        for name, fields in value.items():
            yield from _section_problems(f"{spelling}.{name}", fields, inner)
        return
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        message = f": expected {expectation(annotation)}"
        yield Problem(spelling, value, message, _hint(value, annotation))


def _section_problems(spelling: str, fields: object, section: type[Section]) -> Iterator[Problem]:
    """Yield the problems of a section that a user named."""
    types = field_types(section)
    if not isinstance(fields, Mapping):
        yield Problem(spelling, fields, ": expected keys below it", f"known: {', '.join(types)}")
        return
    for name, value in fields.items():
        if name in types:
            yield from _type_problems(f"{spelling}.{name}", value, types[name])
        else:
            remedy = f"known: {', '.join(types)}"
            yield Problem(f"{spelling}.{name}", value, "is no key of sluice", remedy)
    for field in msgspec.structs.fields(section):
        if field.required and field.name not in fields:
            yield Problem(f"{spelling}.{field.name}", msgspec.UNSET, "is not set", "set it")


def _element_problems(
    spelling: str, values: list[object], section: type[Section]
) -> Iterator[Problem]:
    """Yield the problems of a list of mappings, by the number of the element."""
    for number, value in enumerate(values):
        try:
            msgspec.convert(value, section)
        except msgspec.ValidationError as error:
            keys = f"its keys are {', '.join(field_types(section))}"
            yield Problem(f"{spelling}[{number}]", value, f": {error}".replace(" `$.", " `"), keys)


def _hint(value: object, annotation: object) -> str:
    """Return the remedy for a value that has the right text but the wrong YAML type."""
    expected = expectation(annotation)
    if value == "None" and expected.endswith("null"):
        return "the word for nothing is null"
    if isinstance(value, str) and expected.startswith("true or false"):
        return "YAML 1.2 has no other words for them"
    if isinstance(value, int | float) and expected.startswith("a string"):
        return "put the value in quotes"
    if isinstance(value, str) and isinstance(parse_word(value), int | float):
        return "write it without quotes"
    if isinstance(value, str) and expected.startswith(("an integer", "a number")):
        number = parse_scalar(re.sub(r"^([-+]?)0+(?=\d)", r"\1", value))
        if isinstance(number, int):
            return f"write {number}; {value} is text to Hydra, and octal in a YAML file of verl's"
        if isinstance(number, float):
            return f"write {number}; {value} is text to Hydra"
    if isinstance(value, float) and value.is_integer() and expected.startswith("an integer"):
        return "write it without a decimal point"
    return ""
