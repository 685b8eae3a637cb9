"""Values by dotted key: of the typed configuration, and of keys that only verl has.

The typed configuration does not keep keys that mean nothing to sluice (Megatron's sizes, say).
verl's rules and the estimate of memory need them all the same, so they are read from where the
user set them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sluice.config.loader import read_settings
from sluice.config.run import RunConfig
from sluice.config.settings_tree import value_at


class KeySettings:
    """Looks keys up in the typed configuration, then among those the user set."""

    def __init__(self, config: RunConfig, as_set: Mapping[str, object] | None = None) -> None:
        self._typed: Mapping[str, object] = msgspec.to_builtins(config)
        self._as_set = as_set or {}

    def is_set(self, *keys: str) -> bool:
        """Whether the user gave one of these keys a value other than null."""
        return any(self._as_set.get(key) is not None for key in keys)

    def value(self, *keys: str) -> object:
        """The value of the first of these spellings that has one; `None` if none has."""
        for source in (self._in_schema, self._as_set.get):
            for key in keys:
                found = source(key)
                if found is not None:
                    return found
        return None

    def whole(self, *keys: str, otherwise: int) -> int:
        """A whole number; `otherwise` where none is set."""
        found = self.whole_or_none(*keys)
        return otherwise if found is None else found

    def whole_or_none(self, *keys: str) -> int | None:
        """A whole number, or nothing."""
        found = self.value(*keys)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def number(self, *keys: str, otherwise: float) -> float:
        """A number; `otherwise` where none is set."""
        found = self.value(*keys)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return float(found)
        return otherwise

    def flag(self, *keys: str, otherwise: bool) -> bool:
        """True or false; `otherwise` where neither is set."""
        found = self.value(*keys)
        return found if isinstance(found, bool) else otherwise

    def text(self, *keys: str, otherwise: str) -> str:
        """A text; `otherwise` where none is set."""
        found = self.value(*keys)
        return found if isinstance(found, str) else otherwise

    def _in_schema(self, key: str) -> object:
        return value_at(self._typed, key.split("."), None)


def keys_as_set(file: Path | None, overrides: Sequence[str]) -> dict[str, object]:
    """Every key that a file or the overrides set, dotted, in sluice's spelling.

    Raises:
        ConfigError: as `load_config` does for names and references.
    """
    settings = read_settings(file, overrides)
    return {".".join(path): value for path, value in settings.leaves()}
