"""Differences between two resolved configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from sluice.config.catalogue.entry import ABSENT
from sluice.config.run import RunConfig
from sluice.config.schema import KeyPath


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
