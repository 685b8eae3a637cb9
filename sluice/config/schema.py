"""Walks the typed tree of the configuration: which keys there are, and of what type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, get_args, get_origin

import msgspec

from sluice.config.run import RunConfig
from sluice.config.section import Section

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
