"""Finds keys in the typed schema and in the catalogue beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sluice.config.catalogue.entry import Entry
from sluice.config.catalogue.spellings import OPEN_SECTIONS, OTHER_SPELLINGS
from sluice.config.catalogue.table import CATALOGUE
from sluice.config.schema import KeyPath, annotation_at, is_free_form, known_keys, section_type


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key that takes a value.

    Attributes:
        entry: its row in the catalogue, or that of the free-form key or block it stands below.
        annotation: the type of the value; `object` below free-form keys and in blocks.
        in_schema: whether the typed schema holds the value.
    """

    entry: Entry
    annotation: object
    in_schema: bool


def find_key(path: KeyPath) -> FoundKey | None:
    """The key at `path` in sluice's spelling; `None` for sections and unknown keys."""
    entry = CATALOGUE.get(".".join(path))
    if entry is not None:
        annotation = annotation_at(path) if entry.in_schema else entry.annotation
        return FoundKey(entry, annotation, entry.in_schema)
    above = _entry_above(path)
    if above is None:
        return None
    if above.is_block:
        return FoundKey(above, object, in_schema=False)
    if above.in_schema and is_free_form(annotation_at(above.path.split("."))):
        return FoundKey(above, object, in_schema=True)
    return None


def _entry_above(path: KeyPath) -> Entry | None:
    for length in range(len(path) - 1, 0, -1):
        entry = CATALOGUE.get(".".join(path[:length]))
        if entry is not None:
            return entry
    return None


@cache
def is_section(path: KeyPath) -> bool:
    """Whether keys stand below `path`, each looked at on its own."""
    if section_type(annotation_at(path)) is not None:
        return True
    entry = CATALOGUE.get(".".join(path))
    return (entry is not None and entry.is_block) or ".".join(path) in _inner_nodes()


@cache
def _inner_nodes() -> frozenset[str]:
    names = set()
    for key in (*CATALOGUE, *OTHER_SPELLINGS):
        parts = key.split(".")
        names |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return frozenset(names)


@cache
def all_names() -> tuple[str, ...]:
    """Every path that may be written: keys, sections, and other spellings of keys."""
    return tuple(dict.fromkeys((*known_keys(), *CATALOGUE, *OTHER_SPELLINGS)))


def is_open(path: KeyPath) -> bool:
    """Whether verl's schema is open there, so that its users must write ``+``."""
    written = ".".join(path)
    return any(written.startswith(f"{section}.") for section in OPEN_SECTIONS)
