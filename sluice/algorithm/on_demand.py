"""Find a function by the name a configuration gives it, importing its module only then."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from sluice.errors import ConfigError


def import_named(table: Mapping[str, str], name: str, *, key: str) -> object:
    """Import what `table` holds under `name` as ``"module:attribute"``.

    Args:
        table: known names and where they live.
        name: the configured name.
        key: the configuration key that held `name`, for the error.

    Raises:
        ConfigError: `name` is not in `table`.
    """
    target = table.get(name)
    if target is None:
        raise ConfigError(f"{key}: unknown value '{name}'; known: {', '.join(sorted(table))}")
    module, _, attribute = target.partition(":")
    found: object = getattr(import_module(module), attribute)
    return found
