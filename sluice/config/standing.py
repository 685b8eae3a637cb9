"""Says what becomes of one value that a user set."""

from __future__ import annotations

from sluice.config.catalogue.entry import Entry, Status
from sluice.config.key_lookup import FoundKey
from sluice.config.schema import KeyPath
from sluice.config.structure import caveat_of, refusal_of


def standing(found: FoundKey, path: KeyPath, value: object, *, renamed: bool) -> Status:
    """Return what becomes of `value` at `path`.

    A key that nothing here reads is not honoured by a value that asks for what happens anyway: it
    has no effect. `renamed`: the key was written in another spelling.
    """
    entry = found.entry
    if entry.path == ".".join(path) and refusal_of(entry, value):
        return Status.REFUSED
    if is_silent(entry, path, value):
        return entry.status if entry.status is Status.HONOURED else Status.NOT_APPLICABLE
    if caveat_of(entry, value):
        return Status.NOT_APPLICABLE
    if entry.is_block and not entry.in_schema:
        return Status.NOT_APPLICABLE
    if entry.status is Status.REFUSED:
        return Status.NOT_APPLICABLE
    if entry.status is Status.HONOURED and renamed:
        return Status.MAPPED
    return entry.status


def is_silent(entry: Entry, path: KeyPath, value: object) -> bool:
    """Whether the value of a key asks for what happens anyway, as null always does."""
    if value is None:
        return True
    if entry.path != ".".join(path):
        return entry.is_block and value in (False, [], {})
    return any(
        value == silent and isinstance(value, bool) == isinstance(silent, bool)
        for silent in entry.silent
    )
