"""Find a key of the catalogue by any accepted spelling, or suggest the nearest ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from msgspec import UNSET

from sluice.config.catalogue.table import (
    CatalogueEntry,
    catalogue,
    open_sections,
    short_forms,
    spellings,
)
from sluice.config.problems import Problem
from sluice.config.run import annotation_at, is_free_form, known_keys, section_type

KeyPath = tuple[str, ...]
MAX_SUGGESTIONS = 3
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([A-Za-z0-9_.]+)(?:,[^{}]*)?\}$")
MANDATORY = "???"
HYDRA_MARKERS = ("_target_", "_partial_", "_recursive_", "_convert_")


def find_key(path: KeyPath) -> CatalogueEntry | None:
    """Return the entry of the key at `path` in sluice's spelling; `None` for a section or an
    unknown key.

    Below a free-form key or a block it is the entry of that one, and values are of any type.
    """
    if (entry := catalogue().get(".".join(path))) is not None:
        return entry
    above = _entry_above(path)
    if above is None:
        return None
    if above.is_block:
        return replace(above, annotation=object, in_schema=False)
    if above.in_schema and is_free_form(above.annotation):
        return replace(above, annotation=object)
    return None


def _entry_above(path: KeyPath) -> CatalogueEntry | None:
    for length in range(len(path) - 1, 0, -1):
        entry = catalogue().get(".".join(path[:length]))
        if entry is not None:
            return entry
    return None


@cache
def is_section(path: KeyPath) -> bool:
    """Return whether `path` has keys below it that are checked one by one."""
    if section_type(annotation_at(path)) is not None:
        return True
    entry = catalogue().get(".".join(path))
    return (entry is not None and entry.is_block) or ".".join(path) in _inner_nodes()


@cache
def _inner_nodes() -> frozenset[str]:
    names = set()
    for key in (*catalogue(), *spellings()):
        parts = key.split(".")
        names |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return frozenset(names)


@cache
def all_names() -> tuple[str, ...]:
    """Return every path that may be written: keys, sections, and other spellings of keys."""
    return tuple(dict.fromkeys((*known_keys(), *catalogue(), *spellings())))


def is_open(path: KeyPath) -> bool:
    """Return whether verl's schema is open there, so that its users must write ``+``."""
    key = ".".join(path)
    return any(key.startswith(f"{section}.") for section in open_sections())


def canonical(path: KeyPath) -> KeyPath:
    """Return the path in sluice's spelling; an unknown path as it is."""
    for length in range(len(path), 0, -1):
        target = spellings().get(".".join(path[:length]))
        if target is not None:
            return canonical((*target.split("."), *path[length:]))
    return path


def full_form(path: KeyPath) -> KeyPath:
    """Return the key that a section given as one value means; other paths unchanged."""
    short = short_forms().get(".".join(path))
    return tuple(short.split(".")) if short else path


def canonical_leaves(value: object, spelled: KeyPath) -> Iterator[tuple[KeyPath, KeyPath, object]]:
    """Yield every value in nested mappings as (path, path as written, value).

    Mappings are entered only where the path is a section: a free-form key keeps its mapping.
    Hydra's class markers and values left open with ``???`` are skipped. So are sections without
    content and nulls in another spelling, which verl's files give to keys that moved.
    """
    path = canonical(spelled)
    section = not spelled or is_section(path)
    if section and isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in HYDRA_MARKERS:
                yield from canonical_leaves(inner, (*spelled, str(key)))
    elif section and value is None:
        return
    elif value != MANDATORY and (value is not None or path == spelled):
        yield full_form(path), spelled, value


def refers_to(value: object, path: KeyPath) -> bool:
    """Return whether `value` is one reference to the key at `path` in some spelling."""
    reference = _REFERENCE.match(value) if isinstance(value, str) else None
    return reference is not None and full_form(canonical(tuple(reference[1].split(".")))) == path


def other_spellings(key: str) -> tuple[str, ...]:
    """Return the other accepted dotted paths of the key in sluice's spelling."""
    spellings_of_key = []
    for spelling, prefix in spellings().items():
        if f"{key}.".startswith(f"{prefix}."):
            spelled = f"{spelling}{key[len(prefix) :]}"
            if canonical(tuple(spelled.split("."))) == tuple(key.split(".")):
                spellings_of_key.append(spelled)
    spellings_of_key += [short for short, full in short_forms().items() if full == key]
    spellings_of_key += [
        spelling for spelling, prefix in spellings().items() if short_forms().get(prefix) == key
    ]
    return tuple(spellings_of_key)


def nearest_keys(path: KeyPath) -> tuple[str, ...]:
    """Return up to three known keys that were probably meant, likeliest first.

    A path that only lacks its first parts (`rollout.n`) comes first; then a path with one part
    misspelt; then names in its section, the same name elsewhere, and similar paths. A name whose
    initials are a key's (`learning_rate`) means that one.
    """
    known_names, written = all_names(), ".".join(path)
    same_end = [key for key in known_names if key.endswith(f".{written}")]
    if same_end:
        return tuple(same_end[:MAX_SUGGESTIONS])
    initials = "".join(part[:1] for part in path[-1].split("_"))
    if len(initials) > 1 and any(key.endswith(f".{initials}") for key in known_names):
        intended = (*path[:-1], initials)
        return (".".join(intended),) if is_known(intended) else nearest_keys(intended)
    repaired = _repair(path)
    if repaired:
        return repaired
    elsewhere = _same_branch(
        [key for key in known_names if key.rpartition(".")[2] == path[-1]], path
    )
    canonical_names = {key: ".".join(canonical(tuple(key.split(".")))) for key in elsewhere}
    elsewhere = [
        key
        for key in elsewhere
        if canonical_names[key] == key or canonical_names[key] not in canonical_names
    ]
    return tuple(
        difflib.get_close_matches(written, elsewhere, cutoff=0.3)
        or difflib.get_close_matches(written, known_names, cutoff=0.8)
    )


def _same_branch(keys: list[str], path: KeyPath) -> list[str]:
    """Return the keys that share the first part of `path`, if any does."""
    return [key for key in keys if key.startswith(f"{path[0]}.")] or keys


def _repair(path: KeyPath) -> tuple[str, ...]:
    """Return the path with names in place of its first wrong part, if the rest then fits."""
    wrong = _first_wrong_index(path)
    parents, following = path[:wrong], path[wrong + 1 :]
    beside = keys_below(parents)
    candidates = _closest_names(path[wrong], beside)
    fitting = [(*parents, name, *following) for name in candidates]
    return tuple(".".join(p) for p in fitting if is_known(p))[:MAX_SUGGESTIONS]


def _closest_names(word: str, names: list[str]) -> list[str]:
    """Return the names that `word` begins; else those most like it, without clearly less similar
    ones."""
    completions = [name for name in names if len(word) > 2 and name.startswith(word)]
    if completions:
        return completions
    matches = difflib.get_close_matches(word, names, cutoff=0.7)
    likeness = [difflib.SequenceMatcher(None, name, word).ratio() for name in matches]
    return [
        name for name, ratio in zip(matches, likeness, strict=True) if ratio > likeness[0] - 0.1
    ]


def is_known(path: KeyPath) -> bool:
    """Return whether `path`, in any spelling, is a key or a section."""
    proper = canonical(path)
    return is_section(proper) or is_section(path) or find_key(proper) is not None


def _first_wrong_index(path: KeyPath) -> int:
    return next(i for i in range(len(path)) if not is_known(path[: i + 1]))


def keys_below(parents: KeyPath) -> list[str]:
    """Return the names directly below a section, other spellings included."""
    prefix = "".join(f"{name}." for name in parents)
    below = (key[len(prefix) :] for key in all_names() if key.startswith(prefix))
    return list(dict.fromkeys(key.partition(".")[0] for key in below))


def unknown_key(path: KeyPath, location: str = "") -> Problem:
    """Return the problem of a key that does not exist, with the probably intended key.

    `location`: file and line, for overrides that stand in a file.
    """
    candidates = nearest_keys(path)
    wrong = _first_wrong_index(path)
    parents = path[:wrong]
    if candidates:
        remedy = f"did you mean {' or '.join(candidates)}?{location}"
        return Problem(".".join(path), UNSET, ": unknown key", remedy)
    beside = keys_below(parents)
    if beside:
        remedy = f"{'.'.join(parents) or 'the root'} knows {', '.join(beside)}"
    else:
        remedy = f"{'.'.join(parents)} is a value and has no keys below it"
    return Problem(".".join(path[: wrong + 1]), UNSET, ": unknown key", f"{remedy}{location}")
