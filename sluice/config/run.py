"""The root of the run configuration, and how to find a key of its typed tree."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Literal, Union, get_args, get_origin

import msgspec

from sluice.config.schema.actor import CriticConfig, GlobalProfilerConfig
from sluice.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from sluice.config.schema.algorithm import AlgorithmConfig
from sluice.config.schema.data import DataConfig
from sluice.config.schema.reward import RewardConfig
from sluice.config.schema.section import Section, field_text
from sluice.config.schema.service import ServiceConfig
from sluice.config.schema.trainer import TrainerConfig

_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    object: "any value",
    type(None): "null",
}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


class RunConfig(Section, frozen=True):
    """The configuration of a run; all services read the same file."""

    data: DataConfig = msgspec.field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = msgspec.field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    critic: CriticConfig = msgspec.field(default_factory=CriticConfig)
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    trainer: TrainerConfig = msgspec.field(default_factory=TrainerConfig)
    global_profiler: GlobalProfilerConfig = msgspec.field(default_factory=GlobalProfilerConfig)
    sluice: ServiceConfig = msgspec.field(default_factory=ServiceConfig)


def bare_type(annotation: object) -> object:
    """Return the annotation without `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def section_type(annotation: object) -> type[Section] | None:
    """Return the section class that a field holds; `None` for a plain value."""
    bare = bare_type(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Section) else None


def element_section(annotation: object) -> type[Section] | None:
    """Return the section class of a list's elements; `None` for anything else."""
    bare = bare_type(annotation)
    return section_type(get_args(bare)[0]) if get_origin(bare) is list else None


def is_free_form(annotation: object) -> bool:
    """Return whether arbitrary keys are allowed below (`engine_kwargs` and the like)."""
    return get_origin(bare_type(annotation)) is dict


def value_section(annotation: object) -> type[Section] | None:
    """Return the section that each value of a mapping holds; `None` for other types."""
    return section_type(get_args(annotation)[1]) if is_free_form(annotation) else None


def expectation(annotation: object) -> str:
    """Return the values that a type accepts, as text, for example ``an integer >= 1 or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded_text(arguments[0], arguments[1:])
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(expectation(choice) for choice in arguments)
    if origin is list or arguments[1:] == (...,):
        return f"a list with each element {expectation(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(map(expectation, arguments))}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)):
        return "a mapping"
    return _WORDS.get(annotation, str(annotation))


def _bounded_text(annotation: object, metas: tuple[object, ...]) -> str:
    words = expectation(annotation)
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        if isinstance(meta, msgspec.Meta)
        for name, sign in _BOUNDS
        if getattr(meta, name) is not None
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words


@cache
def field_types(section: type[Section]) -> dict[str, object]:
    """Return the fields of a section with their annotations, bounds included."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


@cache
def known_keys() -> tuple[str, ...]:
    """Return every key as a dotted path, sections included, in the order of the schema."""
    return tuple(_walk_keys(RunConfig, ""))


def _walk_keys(section: type[Section], prefix: str) -> Iterator[str]:
    for name, annotation in field_types(section).items():
        yield f"{prefix}{name}"
        inner = section_type(annotation)
        if inner is not None:
            yield from _walk_keys(inner, f"{prefix}{name}.")


def leaf_keys() -> Iterator[str]:
    """Yield every key that holds a value, in the order of the schema."""
    return (key for key in known_keys() if section_type(annotation_at(key.split("."))) is None)


def annotation_at(path: Sequence[str]) -> object | None:
    """Return the annotation at `path`: `object` below a free-form key, `None` if unknown."""
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


def text_at(path: Sequence[str]) -> str:
    """Return the meaning of the key at `path` in the schema."""
    section = section_type(annotation_at(path[:-1]))
    assert section is not None
    return field_text(section, path[-1])


@cache
def defaults() -> Mapping[str, object]:
    """Return the schema's defaults as nested mappings."""
    tree = msgspec.to_builtins(RunConfig())
    assert isinstance(tree, dict)
    return tree


def value_at(tree: Mapping[str, object], path: Sequence[str], otherwise: object) -> object:
    """Return the value at `path` in nested mappings, or `otherwise` if a key is missing."""
    node: object = tree
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            return otherwise
        node = node[key]
    return node


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration with typed keys set; faster than reading it again."""
    tree = msgspec.to_builtins(config)
    for text in overrides:
        key, _, value = text.partition("=")
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        with suppress(msgspec.DecodeError):
            node[name] = value
            node[name] = msgspec.json.decode(value)
    return msgspec.convert(tree, RunConfig)
