"""Walks the typed tree of the configuration: which keys there are, and which are meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, get_args, get_origin

import msgspec

from sluice.config.run import RunConfig
from sluice.config.section import Section

KeyPath = tuple[str, ...]
MAX_SUGGESTIONS = 3


def bare_type(annotation: object) -> object:
    """The annotation without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def section_type(annotation: object) -> type[Section] | None:
    """The section class a field holds; `None` for a plain value."""
    bare = bare_type(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Section) else None


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


def nearest_keys(path: Sequence[str]) -> tuple[str, ...]:
    """Up to three known keys that were probably meant, likeliest first.

    A path that only lacks its first parts (`rollout.n`) is taken at its word; otherwise names
    beside it, else the same name elsewhere, else whole paths that look alike.
    """
    wanted, leaf = ".".join(path), path[-1]
    *parents, _ = path
    known = known_keys()
    same_end = [key for key in known if key.endswith(f".{wanted}")]
    if same_end:
        return tuple(same_end[:MAX_SUGGESTIONS])
    beside = section_type(annotation_at(parents))
    siblings = difflib.get_close_matches(leaf, field_types(beside), cutoff=0.7) if beside else []
    if siblings:
        return tuple(".".join((*parents, name)) for name in siblings)
    elsewhere = [key for key in known if key.rpartition(".")[2] == leaf]
    return tuple(
        difflib.get_close_matches(wanted, elsewhere, cutoff=0.3)
        or difflib.get_close_matches(wanted, known, cutoff=0.8)
    )


def unknown_key(path: Sequence[str]) -> str:
    """The sentence about a key that does not exist, with what was probably meant."""
    near = nearest_keys(path)
    wrong = next(i for i in range(1, len(path) + 1) if annotation_at(path[:i]) is None)
    *parents, name = path[:wrong]
    beside = section_type(annotation_at(parents))
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif beside is None:
        hint = f"{'.'.join(parents)} is a value and has no keys below it"
    else:
        hint = f"{'.'.join(parents) or 'the root'} knows {', '.join(field_types(beside))}"
    return f"{'.'.join((*parents, name) if not near else path)}: unknown key; {hint}"
