"""The base of every configuration section, and the bounds that fields share."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of the run configuration. The string below a field is its description."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]


def field_text(section: type[Section], name: str) -> str:
    """Return the text below a field in its class or in the nearest base; empty without one."""
    texts = (_texts(kind.__module__).get((kind.__name__, name)) for kind in section.__mro__[:-2])
    return next((text for text in texts if text), "")


@cache
def _texts(module: str) -> Mapping[tuple[str, str], str]:
    """Return the texts of a module on one line each, by class and field."""
    texts = {}
    # Python keeps no text below an attribute, so it has to be read from the source.
    for section in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for field, text in pairwise(section.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    texts[section.name, name] = " ".join(words.split())
    return texts
