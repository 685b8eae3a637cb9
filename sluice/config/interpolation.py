"""Resolves ``${a.b}`` references between configuration values."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sluice.config.overrides import value_at
from sluice.config.schema import annotation_at, unknown_key
from sluice.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_MISSING = object()


def resolve_references(
    tree: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """A copy of `tree` without references.

    A value that is one reference takes the other value with its type; a reference inside a longer
    string is written out. Keys the tree does not set are looked up in `defaults`.

    Raises:
        ConfigError: a reference to an unknown key, to itself in a circle, or to a resolver such as
            ``oc.env``.
    """
    resolver = _Resolver(tree, defaults)
    return {key: resolver.resolve(value, (key,)) for key, value in tree.items()}


class _Resolver:
    def __init__(self, tree: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        self._tree, self._defaults = tree, defaults

    def resolve(self, value: object, chain: tuple[str, ...]) -> object:
        """`value` without references; `chain` names the keys on the way, for circles."""
        if isinstance(value, Mapping):
            return {k: self.resolve(v, (*chain[:-1], f"{chain[-1]}.{k}")) for k, v in value.items()}
        if isinstance(value, list):
            return [self.resolve(item, chain) for item in value]
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._look_up(whole[1].strip(), chain)
        return _REFERENCE.sub(lambda m: _written(self._look_up(m[1].strip(), chain)), value)

    def _look_up(self, key: str, chain: tuple[str, ...]) -> object:
        at = chain[-1]
        if ":" in key:
            raise ConfigError(
                f"{at}: the reference ${{{key}}} calls a resolver; only ${{key.path}} is known, "
                "so write the value itself"
            )
        if key in chain:
            raise ConfigError(f"{at}: references run in a circle: {' -> '.join((*chain, key))}")
        path = key.split(".")
        for source in (self._tree, self._defaults):
            found = value_at(source, path, _MISSING)
            if found is not _MISSING:
                return self.resolve(found, (*chain, key))
        if annotation_at(path) is None:
            raise ConfigError(f"{at}: reference ${{{key}}}: {unknown_key(path)}")
        raise ConfigError(f"{at}: reference ${{{key}}}: that key has no value; set it")


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
