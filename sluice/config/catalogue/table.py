"""The catalogue: how sluice treats every configuration key.

`verl.toml` and `sluice.toml` hold texts; types, defaults and meanings come from the typed schema,
so a key of the schema that needs no further text has no row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, reduce
from importlib import resources
from operator import or_
from types import GenericAlias
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET

from sluice.config.run import annotation_at, defaults, expectation, leaf_keys, text_at, value_at
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from sluice.config.schema.section import PositiveInt

SECTIONS: dict[str, str] = {
    "data": "data",
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.ref": "reference",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref": "shared",
    "algorithm": "algorithm",
    "reward": "reward",
    "critic": "critic",
    "trainer": "trainer",
    "sluice": "sluice's own",
    "": "verl's launcher",
}
"""Section titles by path prefix; the first matching prefix counts."""

_FILES = ("verl.toml", "sluice.toml")
_TYPES: dict[str, object] = {
    "any": object,
    "bool": bool,
    "float": float,
    "int": int,
    "int >= 1": PositiveInt,
    "list[str]": list[str],
    "null": None,
    "str": str,
}
_UNITS = {"_s": "seconds", "_ms": "milliseconds", "_kb": "KiB", "_mb": "MiB"}
_NOT_TORCH = f"{' and '.join(VENDOR_ENGINES)} read it, torch does without"


class KeyStatus(StrEnum):
    """How a key's value is treated."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    NOT_APPLICABLE = "not applicable"
    REFUSED = "refused"


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values that a key does not accept unchanged.

    Attributes:
        reason: why, and what to do instead; it ends a sentence that starts with the key.
        values: these values, or lists that hold one of them.
        unless: every text except these.
        prefix: texts with this prefix, or lists that hold one.
    """

    reason: str
    values: list[object] = []
    unless: list[str] = []
    prefix: str = ""

    def meets(self, value: object) -> bool:
        """Return whether `value` meets the condition."""
        if self.unless:
            return isinstance(value, str) and value not in self.unless
        items = value if isinstance(value, list) else [value]
        if self.prefix:
            return any(isinstance(item, str) and item.startswith(self.prefix) for item in items)
        return any(item in self.values for item in items)


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key's row in a file, as written; see the head of verl.toml for its fields."""

    meaning: str = ""
    type: str = ""
    default: object = None
    block: bool = False
    mapped: str = ""
    no_effect: str = ""
    refused: str = ""
    quiet: list[object] | None = None
    sets: list[str] = []
    copied: bool = False
    unit: str = ""
    effect: str = ""
    advice: str = ""
    verl: str = ""
    refuse: Condition | None = None
    caveat: Condition | None = None


class _CatalogueSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows below one or several prefixes, with the texts that they share."""

    below: str | list[str]
    keys: dict[str, _Row]
    meaning: str = ""
    no_effect: str = ""
    engines: list[str] = []


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    section: list[_CatalogueSection]
    spellings: dict[str, str] = {}
    short_forms: dict[str, str] = {}
    open_sections: list[str] = []


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A key of the catalogue.

    Attributes:
        path: dotted, in sluice's spelling.
        status: how sluice treats the value.
        row_meaning: the row's meaning; empty for a key of the schema.
        annotation: the type of the value.
        default: the value of an unset key, as YAML reads it.
        in_schema: whether the typed schema holds the value; other values are checked and dropped.
        instead: for MAPPED the conversion, for NOT_APPLICABLE what happens instead, for REFUSED
            why; it ends a sentence that starts with the key.
        targets: the keys of the schema that a MAPPED key sets.
        is_copied: whether the target takes the value unchanged.
        verl_default: verl's default as text, if it differs.
        unit: the unit of a number (``tokens``, ``prompts``); may be empty.
        effect: on memory and speed; may be empty.
        advice: from practice; may be empty.
        silent: values that need no notice, since they ask for what happens anyway.
        refuse: values that are errors.
        caveat: values that are accepted but have no effect here.
        is_block: arbitrary keys may follow below it and share this row.
        engines: the engines that read the key; empty for all.
    """

    path: str
    status: KeyStatus
    row_meaning: str
    annotation: object
    default: object
    in_schema: bool
    instead: str = ""
    targets: tuple[str, ...] = ()
    is_copied: bool = False
    verl_default: str | None = None
    unit: str = ""
    effect: str = ""
    advice: str = ""
    silent: tuple[object, ...] = ()
    refuse: Condition | None = None
    caveat: Condition | None = None
    is_block: bool = False
    engines: tuple[str, ...] = ()

    @property
    def meaning(self) -> str:
        """One or two sentences."""
        return self.row_meaning or text_at(self.path.split("."))

    @property
    def takes(self) -> str:
        """The accepted values as text (``an integer >= 1 or null``)."""
        return "any keys below it" if self.is_block else expectation(self.annotation)

    def refusal_of(self, value: object) -> str:
        """Return why the value is an error for this key; empty if it is not."""
        if self.status is KeyStatus.REFUSED and value not in (None, self.default):
            return self.instead
        return self.refuse.reason if self.refuse and self.refuse.meets(value) else ""

    def caveat_of(self, value: object) -> str:
        """Return why the value lacks its full effect; empty if it does not."""
        return self.caveat.reason if self.caveat and self.caveat.meets(value) else ""


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Return every entry by its path.

    Entries stand in the order of `SECTIONS`; in each, keys of the schema come first, in its order.
    """
    entries = {path: _entry(path, _Row()) for path in leaf_keys()}
    paths: set[str] = set()
    for path, entry in _catalogue_rows():
        if path in paths:
            raise ValueError(f"{path} has two rows in the catalogue; keep one of them")
        paths.add(path)
        entries[path] = entry
    order = list(SECTIONS)
    by_section = sorted(entries.values(), key=lambda entry: order.index(section_of(entry.path)))
    return {entry.path: entry for entry in by_section}


def section_of(path: str) -> str:
    """Return the prefix in `SECTIONS` that lists a key."""
    return next(prefix for prefix in SECTIONS if not prefix or f"{path}.".startswith(f"{prefix}."))


def spellings() -> dict[str, str]:
    """Return other names of keys, as replacements by path prefix; the longest prefix counts."""
    return _load_file("verl.toml").spellings


def short_forms() -> dict[str, str]:
    """Return sections that may be given as one value, and the key that the value sets."""
    return _load_file("verl.toml").short_forms


def open_sections() -> list[str]:
    """Return sections whose schema is open in verl, so that its users write ``+`` there."""
    return _load_file("verl.toml").open_sections


@cache
def _load_file(name: str) -> _File:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)


def _catalogue_rows() -> Iterator[tuple[str, CatalogueEntry]]:
    for section in (one for name in _FILES for one in _load_file(name).section):
        prefixes = [section.below] if isinstance(section.below, str) else section.below
        for prefix in prefixes:
            for name, row in section.keys.items():
                path = f"{prefix}.{name}" if prefix else name
                yield path, _entry(path, row, section)


def _entry(path: str, row: _Row, section: _CatalogueSection | None = None) -> CatalogueEntry:
    shared = section or _CatalogueSection(below="", keys={})
    meaning, no_effect = row.meaning or shared.meaning, row.no_effect or shared.no_effect
    in_schema = not meaning
    keys, status = path.split("."), KeyStatus.HONOURED
    if row.mapped:
        status = KeyStatus.MAPPED
    elif row.refused:
        status = KeyStatus.REFUSED
    elif no_effect:
        status = KeyStatus.NOT_APPLICABLE
    annotation = annotation_at(keys) if in_schema else _row_type(row)
    if annotation is None:
        raise ValueError(f"{path} has a row without a meaning, but the schema has no such key")
    default = value_at(defaults(), keys, UNSET) if in_schema else ({} if row.block else row.default)
    silent = () if in_schema or row.block else (row.default,)
    return CatalogueEntry(
        path=path,
        status=status,
        row_meaning=meaning,
        annotation=annotation,
        default=default,
        in_schema=in_schema,
        instead=row.mapped or row.refused or no_effect,
        # A target that starts with a dot is in the key's own section.
        targets=tuple(f"{path.rpartition('.')[0]}{t}" if t[0] == "." else t for t in row.sets),
        is_copied=row.copied,
        verl_default=row.verl or None,
        unit=row.unit or (_unit(path) if in_schema else ""),
        effect=_effect(row.effect, shared.engines),
        advice=row.advice,
        silent=silent if row.quiet is None else tuple(row.quiet),
        refuse=row.refuse,
        caveat=row.caveat,
        is_block=row.block,
        engines=tuple(shared.engines),
    )


def _unit(path: str) -> str:
    """Return the unit that the end of a key's name gives, as for `timeout_s`."""
    return next((unit for end, unit in _UNITS.items() if path.endswith(end)), "")


def _effect(effect: str, engines: list[str]) -> str:
    if not engines:
        return effect
    return f"{effect}; {_NOT_TORCH}" if effect else f"{_NOT_TORCH[:1].upper()}{_NOT_TORCH[1:]}"


def _row_type(row: _Row) -> object:
    """Return the type of a key outside the schema: the written one, else that of its default."""
    if row.block:
        return object
    if row.type:
        return reduce(or_, map(_plain_type, row.type.split(" | ")))
    return object if row.default is None else type(row.default)


def _plain_type(words: str) -> object:
    # The choices are data here, so the type is built when the table is read.
    for start in ("one of ", "list of "):
        if words.startswith(start):
            choices = cast("Any", Literal)[tuple(words.removeprefix(start).split(", "))]
            return GenericAlias(list, (choices,)) if start == "list of " else choices
    return _TYPES[words]
