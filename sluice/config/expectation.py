"""Says in words which values a field takes, from its annotation."""

from __future__ import annotations

import types
from typing import Annotated, Literal, Union, get_args, get_origin

import msgspec

_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    object: "any value",
    type(None): "null",
}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def expectation(annotation: object) -> str:
    """For example ``an integer >= 1 or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(expectation(choice) for choice in arguments)
    if origin is list:
        return f"a list with each element {expectation(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(map(expectation, arguments))}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)):
        return "a mapping"
    return _WORDS.get(annotation, str(annotation))


def _bounded(annotation: object, metas: tuple[object, ...]) -> str:
    words = expectation(annotation)
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        if isinstance(meta, msgspec.Meta)
        for name, sign in _BOUNDS
        if getattr(meta, name) is not None
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words
