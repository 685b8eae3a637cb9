"""Find a key in the typed schema and the catalogue, by any accepted spelling, or suggest the
nearest ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, get_args, get_origin

import msgspec

from sluice.config.catalogue.entry import Entry
from sluice.config.catalogue.spellings import OPEN_SECTIONS, OTHER_SPELLINGS, SHORT_FORMS
from sluice.config.catalogue.table import CATALOGUE
from sluice.config.run import RunConfig
from sluice.config.schema.section import Section

KeyPath = tuple[str, ...]


def bare_type(annotation: object) -> object:
    """The annotation without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def section_type(annotation: object) -> type[Section] | None:
    """The section class a field holds; `None` for a plain value."""
    bare = bare_type(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Section) else None


def description_of(annotation: object) -> str:
    """The description that an annotation carries; empty without one."""
    metas = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    texts = [meta.description for meta in metas if isinstance(meta, msgspec.Meta)]
    return next((text for text in texts if text), "")


def is_free_form(annotation: object) -> bool:
    """Whether any keys may stand below (`reward_kwargs` and the like)."""
    return get_origin(bare_type(annotation)) is dict


@cache
def field_types(section: type[Section]) -> dict[str, object]:
    """Field names of a section with their annotations, bounds included."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


@cache
def known_keys() -> tuple[str, ...]:
    """Every key as a dotted path, sections included, in the order of the schema."""
    return tuple(".".join(path) for path in _walk(RunConfig, ()))


def _walk(section: type[Section], prefix: KeyPath) -> Iterator[KeyPath]:
    for name, annotation in field_types(section).items():
        path = (*prefix, name)
        yield path
        inner = section_type(annotation)
        if inner is not None:
            yield from _walk(inner, path)


def annotation_at(path: Sequence[str]) -> object | None:
    """The annotation of the key at `path`, `object` below a free-form key, `None` if unknown."""
    annotation: object = RunConfig
    for name in path:
        if is_free_form(annotation) or annotation is object:
            annotation = object
            continue
        section = section_type(annotation)
        if section is None or name not in field_types(section):
            return None
        annotation = field_types(section)[name]
    return annotation


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


HYDRA_MARKERS = ("_target_", "_partial_", "_recursive_", "_convert_")
MANDATORY = "???"
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([A-Za-z0-9_.]+)(?:,[^{}]*)?\}$")


def canonical(path: KeyPath) -> KeyPath:
    """The path in sluice's spelling; unknown paths come back as they are."""
    for length in range(len(path), 0, -1):
        other = OTHER_SPELLINGS.get(".".join(path[:length]))
        if other is not None:
            return canonical((*other.split("."), *path[length:]))
    return path


def full_form(path: KeyPath) -> KeyPath:
    """The key that a section given as one value stands for; other paths as they are."""
    short = SHORT_FORMS.get(".".join(path))
    return tuple(short.split(".")) if short else path


def canonical_leaves(value: object, spelled: KeyPath) -> Iterator[tuple[KeyPath, KeyPath, object]]:
    """Every value in nested mappings as (path, path as written, value).

    Mappings are entered only where the path is a section: a free-form key keeps its mapping.
    Hydra's class markers and values left open with ``???`` are passed over, and so are sections
    without content and nulls in another spelling, which verl's files give to keys that moved.
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
    """Whether `value` is one reference to the key at `path` in some spelling."""
    reference = _REFERENCE.match(value) if isinstance(value, str) else None
    return reference is not None and canonical(tuple(reference[1].split("."))) == path


def other_spellings(key: str) -> tuple[str, ...]:
    """The other dotted paths under which the key in sluice's spelling is accepted."""
    found = []
    for other, prefix in OTHER_SPELLINGS.items():
        if f"{key}.".startswith(f"{prefix}."):
            spelled = f"{other}{key[len(prefix) :]}"
            if canonical(tuple(spelled.split("."))) == tuple(key.split(".")):
                found.append(spelled)
    found += [short for short, full in SHORT_FORMS.items() if full == key]
    found += [other for other, prefix in OTHER_SPELLINGS.items() if SHORT_FORMS.get(prefix) == key]
    return tuple(found)


MAX_SUGGESTIONS = 3


def nearest_keys(path: KeyPath) -> tuple[str, ...]:
    """Up to three known keys that were probably meant, likeliest first.

    A path that only lacks its first parts (`rollout.n`) is taken at its word; then a path with one
    part misspelt; then names beside it, the same name elsewhere, and paths that look alike.
    """
    wanted, leaf = ".".join(path), path[-1]
    known = all_names()
    same_end = [key for key in known if key.endswith(f".{wanted}")]
    if same_end:
        return tuple(same_end[:MAX_SUGGESTIONS])
    repaired = _repaired(path)
    if repaired:
        return repaired
    elsewhere = _same_branch([key for key in known if key.rpartition(".")[2] == leaf], path)
    return tuple(
        difflib.get_close_matches(wanted, elsewhere, cutoff=0.3)
        or difflib.get_close_matches(wanted, known, cutoff=0.8)
    )


def _same_branch(keys: list[str], path: KeyPath) -> list[str]:
    """The keys that share the first part of `path`, if any does."""
    return [key for key in keys if key.startswith(f"{path[0]}.")] or keys


def _repaired(path: KeyPath) -> tuple[str, ...]:
    """The path with its first wrong part replaced by names beside it, if the rest then fits."""
    wrong = _first_wrong(path)
    parents, rest = path[:wrong], path[wrong + 1 :]
    beside = keys_below(parents)
    near = _closest(path[wrong], beside)
    fitting = [(*parents, name, *rest) for name in near]
    return tuple(".".join(p) for p in fitting if is_known(p))[:MAX_SUGGESTIONS]


def _closest(word: str, names: list[str]) -> list[str]:
    """The names most like `word`, without those that are clearly less alike than the best."""
    near = difflib.get_close_matches(word, names, cutoff=0.7)
    likeness = [difflib.SequenceMatcher(None, name, word).ratio() for name in near]
    return [name for name, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.1]


def is_known(path: KeyPath) -> bool:
    """Whether `path`, in any spelling, is a key or a section."""
    proper = canonical(path)
    return is_section(proper) or is_section(path) or find_key(proper) is not None


def _first_wrong(path: KeyPath) -> int:
    return next(i for i in range(len(path)) if not is_known(path[: i + 1]))


def keys_below(parents: KeyPath) -> list[str]:
    """The names directly below a section, those of other spellings included."""
    prefix = "".join(f"{name}." for name in parents)
    below = (key[len(prefix) :] for key in all_names() if key.startswith(prefix))
    return list(dict.fromkeys(key.partition(".")[0] for key in below))


def unknown_key(path: KeyPath) -> str:
    """The sentence about a key that does not exist, with what was probably meant."""
    near = nearest_keys(path)
    wrong = _first_wrong(path)
    parents = path[:wrong]
    if near:
        return f"{'.'.join(path)}: unknown key; did you mean {' or '.join(near)}?"
    beside = keys_below(parents)
    if beside:
        hint = f"{'.'.join(parents) or 'the root'} knows {', '.join(beside)}"
    else:
        hint = f"{'.'.join(parents)} is a value and has no keys below it"
    return f"{'.'.join(path[: wrong + 1])}: unknown key; {hint}"
