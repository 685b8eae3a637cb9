"""Explain keys: what each one means, and what becomes of those that a user set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET

from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.catalogue.table import Entry, KeyStatus, catalogue
from sluice.config.loading.field_checks import expectation
from sluice.config.loading.keys import (
    FoundKey,
    KeyPath,
    canonical,
    find_key,
    full_form,
    is_known,
    keys_below,
    other_spellings,
    unknown_key,
)
from sluice.config.loading.loader import read_document
from sluice.config.loading.overrides import apply_overrides, expand_overrides, is_override_file
from sluice.config.loading.settings_tree import SettingsTree, tree_of
from sluice.config.problems import Problem, Severity, shown
from sluice.config.run import defaults
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
        default: the value of a key that nobody set; a Python value as YAML reads it.
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
    status: KeyStatus
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


def explain_key(path: str) -> KeyDescription:
    """Return the description of one key, in any accepted spelling.

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
        raise ConfigError(unknown_key(asked).text)
    return _describe(found.entry, ".".join(asked))


def keys_of_section(path: str) -> list[KeyDescription]:
    """Return every key below a section, in any accepted spelling; none if it is no section."""
    asked = tuple(path.strip().split("."))
    prefix = f"{'.'.join(canonical(asked))}."
    return [key for key in all_keys() if key.path.startswith(prefix)]


def all_keys() -> list[KeyDescription]:
    """Return every key that is accepted, in the order of the catalogue, each once."""
    return [_describe(entry, entry.path) for entry in catalogue().values()]


def _describe(entry: Entry, asked: str) -> KeyDescription:
    return KeyDescription(
        path=entry.path,
        asked=asked,
        status=entry.status,
        meaning=entry.meaning,
        takes="any keys below it" if entry.is_block else expectation(entry.annotation),
        default=entry.default,
        verl_default=entry.verl_default,
        unit=entry.unit,
        effect=entry.effect,
        advice=entry.advice,
        instead=entry.instead,
        targets=entry.targets,
        spellings=other_spellings(entry.path),
        is_block=entry.is_block,
    )


def key_statuses(settings: SettingsTree) -> dict[str, KeyStatus]:
    """Return what becomes of every key that was set, by its spelling as written."""
    return {
        settings.written(path): _status(found, path, value, settings)
        for path, value in settings.leaves()
        if (found := find_key(path)) is not None
    }


def notices(settings: SettingsTree) -> list[Problem]:
    """Return a note for every key that was set and that is mapped or has no effect.

    There is none for values that ask for what happens anyway. The rule's name is the status.
    """
    found = (_notice(settings, path, value) for path, value in settings.leaves())
    return [notice for notice in found if notice is not None]


def _notice(settings: SettingsTree, path: KeyPath, value: object) -> Problem | None:
    found, spelled, proper = find_key(path), settings.written(path), ".".join(path)
    if found is None or _is_silent(found.entry, path, value):
        return None
    has_rounds = settings.get("sluice.sampling.strategy") == StrategyName.ROUNDS
    if has_rounds and proper in _HONOURED_BY_ROUNDS:
        return None
    status, engines = _status(found, path, value, settings), found.entry.engines
    engine = settings.get(_ENGINE) or "torch"
    if engines and engine not in engines:
        status = KeyStatus.NOT_APPLICABLE
        text = f"has no effect: it tunes {' and '.join(engines)}, and {_ENGINE} is {engine}"
    elif status in (KeyStatus.HONOURED, KeyStatus.REFUSED):
        return None
    elif caveat := found.entry.caveat_of(value):
        text = f"cannot be had: {caveat}"
    elif status is KeyStatus.NOT_APPLICABLE:
        text = f"has no effect: {found.entry.instead}"
    elif found.entry.status is KeyStatus.MAPPED:
        text = found.entry.instead
    else:
        text = f"is read as {proper}"
    return Problem(spelled, value, text, rule=str(status), severity=Severity.NOTE)


def _status(found: FoundKey, path: KeyPath, value: object, settings: SettingsTree) -> KeyStatus:
    entry = found.entry
    if entry.path == ".".join(path) and entry.refusal_of(value):
        return KeyStatus.REFUSED
    if _is_silent(entry, path, value):
        # A key that nothing reads is not honoured just because its value changes nothing.
        return entry.status if entry.status is KeyStatus.HONOURED else KeyStatus.NOT_APPLICABLE
    if entry.caveat_of(value) or (entry.is_block and not entry.in_schema):
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.REFUSED:
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.HONOURED and settings.written(path) != ".".join(path):
        return KeyStatus.MAPPED
    return entry.status


def _is_silent(entry: Entry, path: KeyPath, value: object) -> bool:
    """Return whether the value of a key asks for what happens anyway, as null always does."""
    if value is None:
        return True
    if entry.path != ".".join(path):
        return entry.is_block and value in (False, [], {})
    # In Python 1 == True, and a flag is not a number.
    return any(
        value == silent and isinstance(value, bool) == isinstance(silent, bool)
        for silent in entry.silent
    )


def replaced_values(path: Path | None, overrides: Sequence[str]) -> list[Problem]:
    """Return a note for every key that the file sets and the overrides set otherwise.

    A deployment adds overrides that the author of the file has not seen.

    Args:
        path: the file; `None`: there is none, and nothing is replaced.
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
    found = []
    for key, value in before.items():
        now = after.get(key, UNSET)
        if now != value:
            does = "removes it" if now is UNSET else f"sets it to {shown(now)}"
            text = f"of {path} has no effect: the command {does}"
            found.append(Problem(".".join(key), value, text, severity=Severity.NOTE))
    return found


def _tree(path: Path) -> SettingsTree:
    if not is_override_file(path):
        return tree_of(read_document(path), str(path))
    tree = SettingsTree()
    apply_overrides(tree, expand_overrides([f"@{str(path).removeprefix('@')}"]), defaults())
    return tree
