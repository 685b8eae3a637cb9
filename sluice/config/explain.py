"""Explain keys: what each one means, and what becomes of those that a user set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.catalogue.table import ABSENT, Entry, KeyStatus, catalogue
from sluice.config.loading.field_checks import expectation, shown
from sluice.config.loading.keys import (
    FoundKey,
    KeyPath,
    canonical,
    find_key,
    full_form,
    is_known,
    is_section,
    keys_below,
    other_spellings,
    unknown_key,
)
from sluice.config.loading.loader import read_document, read_settings, settings_of
from sluice.config.loading.overrides import (
    YAML_SUFFIXES,
    OverrideText,
    apply_overrides,
    expand_overrides,
    is_override_file,
    parse_override,
    read_override_file,
)
from sluice.config.loading.settings_tree import SettingsTree, tree_of
from sluice.config.run import RunConfig, annotation_at, defaults, description_of, value_at
from sluice.errors import ConfigError


def standing(found: FoundKey, path: KeyPath, value: object, *, renamed: bool) -> KeyStatus:
    """Return what becomes of `value` at `path`.

    A key that nothing here reads is not honoured by a value that asks for what happens anyway: it
    has no effect. `renamed`: the key was written in another spelling.
    """
    entry = found.entry
    if entry.path == ".".join(path) and entry.refusal_of(value):
        return KeyStatus.REFUSED
    if is_silent(entry, path, value):
        return entry.status if entry.status is KeyStatus.HONOURED else KeyStatus.NOT_APPLICABLE
    if entry.caveat_of(value):
        return KeyStatus.NOT_APPLICABLE
    if entry.is_block and not entry.in_schema:
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.REFUSED:
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.HONOURED and renamed:
        return KeyStatus.MAPPED
    return entry.status


def is_silent(entry: Entry, path: KeyPath, value: object) -> bool:
    """Whether the value of a key asks for what happens anyway, as null always does."""
    if value is None:
        return True
    if entry.path != ".".join(path):
        return entry.is_block and value in (False, [], {})
    return any(
        value == silent and isinstance(value, bool) == isinstance(silent, bool)
        for silent in entry.silent
    )


@dataclass(frozen=True, slots=True)
class FileCoverage:
    """The keys of one file.

    Attributes:
        file: as given.
        keys: spelling as written to status, in the order of the file; unknown keys are left out.
        unknown: sentences, one for each key that is not known, with what was probably meant.
    """

    file: Path
    keys: dict[str, KeyStatus]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The keys of several files.

    Attributes:
        files: one for each file, in the order given.
        counts: distinct keys (in sluice's spelling) over all files for each status.
    """

    files: tuple[FileCoverage, ...]
    counts: dict[KeyStatus, int]

    @property
    def num_unknown(self) -> int:
        """Unknown keys, summed over the files."""
        return sum(len(file.unknown) for file in self.files)


def coverage(paths: Sequence[Path]) -> Coverage:
    """What becomes of every key in `paths`: YAML files (.yaml, .yml) or override files (others).

    A value that changes nothing counts as not applicable, unless the key is honoured; a value that
    is refused counts as refused, and does not end the count. A line of an override file may also
    be a bare key; then its usual standing counts.

    Raises:
        ConfigError: a file cannot be read or parsed; unknown keys are no error but are reported.
    """
    files, seen = [], set()
    for path in paths:
        given = _read(path)
        keys: dict[str, KeyStatus] = {}
        for proper, spelled, status in (*_set_keys(given.settings), *_bare_keys(given.bare)):
            keys[spelled] = status
            seen.add((proper, status))
        files.append(FileCoverage(path, keys, tuple(given.unknown)))
    return Coverage(tuple(files), {s: sum(1 for _, x in seen if x is s) for s in KeyStatus})


@dataclass(slots=True)
class _Given:
    """What a file sets, keys it names without a value, and sentences about unknown keys."""

    settings: SettingsTree
    bare: list[KeyPath] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def _set_keys(settings: SettingsTree) -> Iterator[tuple[str, str, KeyStatus]]:
    for path, value in settings.leaves():
        found, spelled, proper = find_key(path), settings.written(path), ".".join(path)
        if found is not None:
            renamed = spelled != proper
            yield proper, spelled, standing(found, path, value, renamed=renamed)


def _bare_keys(paths: Sequence[KeyPath]) -> Iterator[tuple[str, str, KeyStatus]]:
    for spelled in paths:
        path = full_form(canonical(spelled))
        found = find_key(path)
        if found is not None:
            renamed = path != spelled and found.entry.status is KeyStatus.HONOURED
            status = KeyStatus.MAPPED if renamed else found.entry.status
            yield ".".join(path), ".".join(spelled), status


def _read(path: Path) -> _Given:
    if path.suffix in YAML_SUFFIXES:
        tree = tree_of(read_document(path), str(path))
        written = (tuple(tree.written(p).split(".")) for p, _ in tree.leaves() if not _accepts(p))
        return _Given(tree, [], [unknown_key(spelled) for spelled in written])
    given, known = _Given(SettingsTree()), []
    for item in read_override_file(path):
        bare = "=" not in item.text and not item.text.startswith("~")
        # The value of a bare key is not looked at.
        text = f"{item.text.removesuffix('.*')}=" if bare else item.text
        override = parse_override(text, item.source)
        if not _accepts(canonical(override.path)):
            given.unknown.append(f"{unknown_key(override.path)}{override.where}")
        elif bare:
            given.bare.append(override.path)
        else:
            known.append(OverrideText(item.text.strip().lstrip("+"), item.source))
    apply_overrides(given.settings, known, {})
    return given


def _accepts(path: KeyPath) -> bool:
    return find_key(path) is not None or is_section(path)


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


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with another value.

    Attributes:
        path: dotted.
        left: value in the first configuration; `ABSENT` where a free-form key is missing.
        right: value in the second.
        default: the schema's default; `ABSENT` below free-form keys.
    """

    path: str
    left: object
    right: object
    default: object


def diff_configs(a: RunConfig, b: RunConfig) -> list[Difference]:
    """The keys in which `a` and `b` differ, in the order of the schema."""
    left, right, default = (msgspec.to_builtins(config) for config in (a, b, RunConfig()))
    return list(_differences(left, right, default, ()))


def _differences(
    left: object, right: object, default: object, path: KeyPath
) -> Iterator[Difference]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        below = default if isinstance(default, Mapping) else {}
        for key in dict.fromkeys((*left, *right)):
            yield from _differences(
                left.get(key, ABSENT), right.get(key, ABSENT), below.get(key, ABSENT), (*path, key)
            )
    elif left != right or type(left) is not type(right):
        yield Difference(".".join(path), left, right, default)


# Describes single keys, and says what becomes of the keys that a user set.
#
# Pure: values in, values out, no printing.

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
    status: KeyStatus
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
    return [_describe(entry, entry.path) for entry in catalogue().values()]


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
    refused = found.entry.path == proper and found.entry.refusal_of(value)
    if refused or is_silent(found.entry, path, value):
        return None
    status = standing(found, path, value, renamed=spelled != proper)
    setting, engines = f"{spelled}={shown(value)}", found.entry.engines
    if engines:
        engine = settings.get(_ENGINE) or "torch"
        if engine not in engines:
            says = f"has no effect: it tunes {' and '.join(engines)}, and {_ENGINE} is {engine}"
            return Notice(proper, spelled, KeyStatus.NOT_APPLICABLE, f"{setting} {says}")
    if status is KeyStatus.HONOURED:
        return None
    caveat = found.entry.caveat_of(value)
    if caveat:
        says = f"cannot be had: {caveat}"
    elif status is KeyStatus.NOT_APPLICABLE:
        says = f"has no effect: {found.entry.instead}"
    elif found.entry.status is KeyStatus.MAPPED:
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
