"""Describes single keys, and says what becomes of the keys that a user set.

Pure: values in, values out, no printing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.catalogue.entry import ABSENT, Entry, Status
from sluice.config.catalogue.table import CATALOGUE
from sluice.config.expectation import expectation
from sluice.config.key_lookup import find_key
from sluice.config.loader import defaults, read_settings, settings_of
from sluice.config.schema import KeyPath, annotation_at, description_of
from sluice.config.settings_tree import SettingsTree, value_at
from sluice.config.spelling import canonical, full_form, other_spellings
from sluice.config.standing import is_silent, standing
from sluice.config.structure import caveat_of, refusal_of, shown
from sluice.config.unknown_keys import is_known, keys_below, unknown_key
from sluice.errors import ConfigError

_ENGINE = "actor_rollout_ref.rollout.name"
_HONOURED_BY_ROUNDS = frozenset(
    {"data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches"}
)


@dataclass(frozen=True, slots=True)
class KeyDescription:
    """Everything known about one key.

    Attributes:
        path: the spelling that sluice uses.
        asked: the spelling that was asked for; differs from `path` for an old one.
        status: what becomes of a value.
        meaning: one or two sentences.
        takes: which values, in words (``an integer >= 1 or null``).
        default: the value without one being set; a Python value as YAML reads it.
        verl_default: verl's default in words where it differs; else `None`.
        unit: of a number (``tokens``, ``prompts``); empty where there is none.
        effect: on memory and speed; may be empty.
        advice: from practice; may be empty.
        instead: conversion, replacement or reason, by `status`; empty where honoured.
        targets: keys that a mapped key sets.
        spellings: other names under which the key is accepted, as dotted paths.
        is_block: any keys may stand below.
    """

    path: str
    asked: str
    status: Status
    meaning: str
    takes: str
    default: object
    verl_default: str | None
    unit: str
    effect: str
    advice: str
    instead: str
    targets: tuple[str, ...]
    spellings: tuple[str, ...]
    is_block: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """One line about a key that the user set and that is not simply honoured.

    Attributes:
        path: the key as sluice spells it.
        spelled: the key as the user spelled it.
        status: MAPPED or NOT_APPLICABLE.
        text: the whole line, without a full stop, for the console at start.
    """

    path: str
    spelled: str
    status: Status
    text: str


def explain_key(path: str) -> KeyDescription:
    """The description of one key, in any accepted spelling.

    A key below a free-form one or a block is described by that one.

    Raises:
        ConfigError: no such key; names the nearest known ones.
    """
    asked = tuple(path.strip().lstrip("+~").removesuffix(".*").split("."))
    proper = canonical(asked)
    found = find_key(proper) or find_key(full_form(proper))
    if found is None:
        if is_known(asked):
            raise ConfigError(
                f"{path} is a section; ask for a key below it: {', '.join(keys_below(proper))}"
            )
        raise ConfigError(unknown_key(asked))
    return _describe(found.entry, ".".join(asked))


def keys_of_section(path: str) -> list[KeyDescription]:
    """Every key below a section, in any accepted spelling of it; none if it is no section."""
    asked = tuple(path.strip().split("."))
    prefix = f"{'.'.join(canonical(asked))}."
    return [key for key in all_keys() if key.path.startswith(prefix)]


def all_keys() -> list[KeyDescription]:
    """Every key that is accepted, in the order of the sections, old spellings not repeated."""
    return [_describe(entry, entry.path) for entry in CATALOGUE.values()]


def notices(overrides: Sequence[str], tree: Mapping[str, object] | None = None) -> list[Notice]:
    """A line for every key set in `tree` (a YAML file's) or `overrides` that is mapped or has no
    effect here; none for values that ask for what happens anyway.

    Args:
        overrides: ``key=value`` texts, or names of override files.
        tree: nested mappings as read from a YAML file.

    Raises:
        ConfigError: unknown keys or malformed overrides.
    """
    return notices_of(settings_of(tree or {}, overrides, "configuration"))


def launch_notices(path: Path | None, overrides: Sequence[str]) -> list[Notice]:
    """The notices for the arguments of `load_config`.

    Raises:
        ConfigError: as `read_settings`.
    """
    return notices_of(read_settings(path, overrides))


def notices_of(settings: SettingsTree) -> list[Notice]:
    """The notices for settings that were read already, in their order."""
    found = (_notice(settings, path, value) for path, value in settings.leaves())
    has_rounds = settings.get("sluice.sampling.strategy") == StrategyName.ROUNDS
    silent = _HONOURED_BY_ROUNDS if has_rounds else frozenset()
    return [notice for notice in found if notice is not None and notice.path not in silent]


def _notice(settings: SettingsTree, path: KeyPath, value: object) -> Notice | None:
    found, spelled, proper = find_key(path), settings.written(path), ".".join(path)
    if found is None:
        return None
    refused = found.entry.path == proper and refusal_of(found.entry, value)
    if refused or is_silent(found.entry, path, value):
        return None
    status = standing(found, path, value, renamed=spelled != proper)
    setting, engines = f"{spelled}={shown(value)}", found.entry.engines
    if engines:
        engine = settings.get(_ENGINE) or "torch"
        if engine not in engines:
            says = f"has no effect: it tunes {' and '.join(engines)}, and {_ENGINE} is {engine}"
            return Notice(proper, spelled, Status.NOT_APPLICABLE, f"{setting} {says}")
    if status is Status.HONOURED:
        return None
    caveat = caveat_of(found.entry, value)
    if caveat:
        says = f"cannot be had: {caveat}"
    elif status is Status.NOT_APPLICABLE:
        says = f"has no effect: {found.entry.instead}"
    elif found.entry.status is Status.MAPPED:
        says = found.entry.instead
    else:
        says = f"is read as {proper}"
    return Notice(proper, spelled, status, f"{setting} {says}")


def _describe(entry: Entry, asked: str) -> KeyDescription:
    in_schema = entry.in_schema
    parts = entry.path.split(".")
    annotation = annotation_at(parts) if in_schema else entry.annotation
    return KeyDescription(
        path=entry.path,
        asked=asked,
        status=entry.status,
        meaning=description_of(annotation) if in_schema else entry.meaning,
        takes=expectation(annotation) if not entry.is_block else "any keys below it",
        default=value_at(defaults(), parts, ABSENT) if in_schema else entry.default,
        verl_default=entry.verl_default,
        unit=entry.unit,
        effect=entry.effect,
        advice=entry.advice,
        instead=entry.instead,
        targets=entry.targets,
        spellings=other_spellings(entry.path),
        is_block=entry.is_block,
    )
