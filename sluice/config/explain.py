"""Explain keys: the meaning of each key, and the treatment of those that a user set."""

from __future__ import annotations

from msgspec import UNSET

from sluice.algorithm.sampling.rules import StrategyName
from sluice.config.catalogue.table import CatalogueEntry, KeyStatus, catalogue
from sluice.config.loading.keys import (
    KeyPath,
    canonical,
    find_key,
    full_form,
    is_known,
    keys_below,
    unknown_key,
)
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.problems import Problem, Severity
from sluice.errors import ConfigError

_ENGINE = "actor_rollout_ref.rollout.name"
_HONOURED_BY_ROUNDS = frozenset(
    {"data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches"}
)


def explain_key(path: str) -> CatalogueEntry:
    """Return the catalogue entry of a key, in any accepted spelling.

    A key below a free-form one or a block has that one's entry.

    Raises:
        ConfigError: there is no such key; the error names the nearest known ones.
    """
    written = tuple(path.strip().lstrip("+~").removesuffix(".*").split("."))
    proper = canonical(written)
    entry = find_key(proper) or find_key(full_form(proper))
    if entry is None:
        if is_known(written):
            raise ConfigError(
                f"{path} is a section; name a key below it: {', '.join(keys_below(proper))}"
            )
        raise ConfigError(unknown_key(written).text)
    return catalogue()[entry.path]


def keys_of_section(path: str) -> list[CatalogueEntry]:
    """Return every key below a section, in any accepted spelling; none if it is no section."""
    prefix = f"{'.'.join(canonical(tuple(path.strip().split('.'))))}."
    return [entry for entry in catalogue().values() if entry.path.startswith(prefix)]


def key_statuses(settings: SettingsTree) -> dict[str, KeyStatus]:
    """Return the treatment of every key that was set, by its spelling as written."""
    return {
        settings.spelling(path): _status(entry, path, value, settings)
        for path, value in settings.leaves()
        if (entry := find_key(path)) is not None
    }


def notices(settings: SettingsTree) -> list[Problem]:
    """Return a note for every key that was set and that is mapped or has no effect.

    Values that change nothing get no note. The rule's name is the status.
    """
    candidates = (_notice(settings, path, value) for path, value in settings.leaves())
    return [notice for notice in candidates if notice is not None]


def _notice(settings: SettingsTree, path: KeyPath, value: object) -> Problem | None:
    entry, spelled, proper = find_key(path), settings.spelling(path), ".".join(path)
    if entry is None or _is_silent(entry, path, value):
        return None
    has_rounds = settings.get("sluice.sampling.strategy") == StrategyName.ROUNDS
    if has_rounds and proper in _HONOURED_BY_ROUNDS:
        return None
    status, engines = _status(entry, path, value, settings), entry.engines
    engine = settings.get(_ENGINE) or "torch"
    if engines and engine not in engines:
        status = KeyStatus.NOT_APPLICABLE
        is_set = settings.get(_ENGINE) is not UNSET
        left_out = f"is left out: replicas run torch; where verl ran vllm, set {_ENGINE}=vllm"
        which = f"is {engine}" if is_set else left_out
        text = f"has no effect: it tunes {' and '.join(engines)}, and {_ENGINE} {which}"
    elif status in (KeyStatus.HONOURED, KeyStatus.REFUSED):
        return None
    elif caveat := entry.caveat_of(value):
        text = f"cannot be had: {caveat}"
    elif status is KeyStatus.NOT_APPLICABLE:
        text = f"has no effect: {entry.instead}"
    elif entry.status is KeyStatus.MAPPED:
        text = entry.instead
    else:
        text = f"is read as {proper}"
    return Problem(spelled, value, text, rule=str(status), severity=Severity.NOTE)


def _status(
    entry: CatalogueEntry, path: KeyPath, value: object, settings: SettingsTree
) -> KeyStatus:
    if entry.path == ".".join(path) and entry.refusal_of(value):
        return KeyStatus.REFUSED
    if _is_silent(entry, path, value):
        # A key that nothing reads is not honoured just because its value changes nothing.
        return entry.status if entry.status is KeyStatus.HONOURED else KeyStatus.NOT_APPLICABLE
    if entry.caveat_of(value) or (entry.is_block and not entry.in_schema):
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.REFUSED:
        return KeyStatus.NOT_APPLICABLE
    if entry.status is KeyStatus.HONOURED and settings.spelling(path) != ".".join(path):
        return KeyStatus.MAPPED
    return entry.status


def _is_silent(entry: CatalogueEntry, path: KeyPath, value: object) -> bool:
    """Return whether the value of a key changes nothing, as null always."""
    if value is None:
        return True
    if entry.path != ".".join(path):
        return entry.is_block and value in (False, [], {})
    # In Python 1 == True, and a flag is not a number.
    return any(
        value == silent and isinstance(value, bool) == isinstance(silent, bool)
        for silent in entry.silent
    )
