"""Turns every accepted spelling of a key into the one that sluice uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sluice.config.catalogue.spellings import OTHER_SPELLINGS, SHORT_FORMS
from sluice.config.key_lookup import is_section
from sluice.config.schema import KeyPath

HYDRA_MARKERS = ("_target_", "_partial_", "_recursive_", "_convert_")
MANDATORY = "???"
_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([A-Za-z0-9_.]+)(?:,[^{}]*)?\}$")


def canonical(path: KeyPath) -> KeyPath:
    """The path in sluice's spelling; unknown paths come back as they are."""
    for length in range(len(path), 0, -1):
        other = OTHER_SPELLINGS.get(".".join(path[:length]))
        if other is not None:
            return canonical((*other.split("."), *path[length:]))
    return path


def full_form(path: KeyPath) -> KeyPath:
    """The key that a section given as one value stands for; other paths as they are."""
    short = SHORT_FORMS.get(".".join(path))
    return tuple(short.split(".")) if short else path


def canonical_leaves(value: object, spelled: KeyPath) -> Iterator[tuple[KeyPath, KeyPath, object]]:
    """Every value in nested mappings as (path, path as written, value).

    Mappings are entered only where the path is a section: a free-form key keeps its mapping.
    Hydra's class markers and values left open with ``???`` are passed over, and so are sections
    without content and nulls in another spelling, which verl's files give to keys that moved.
    """
    path = canonical(spelled)
    section = not spelled or is_section(path)
    if section and isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in HYDRA_MARKERS:
                yield from canonical_leaves(inner, (*spelled, str(key)))
    elif section and value is None:
        return
    elif value != MANDATORY and (value is not None or path == spelled):
        yield full_form(path), spelled, value


def refers_to(value: object, path: KeyPath) -> bool:
    """Whether `value` is one reference to the key at `path` in some spelling."""
    reference = _REFERENCE.match(value) if isinstance(value, str) else None
    return reference is not None and canonical(tuple(reference[1].split("."))) == path


def other_spellings(key: str) -> tuple[str, ...]:
    """The other dotted paths under which the key in sluice's spelling is accepted."""
    found = []
    for other, prefix in OTHER_SPELLINGS.items():
        if f"{key}.".startswith(f"{prefix}."):
            spelled = f"{other}{key[len(prefix) :]}"
            if canonical(tuple(spelled.split("."))) == tuple(key.split(".")):
                found.append(spelled)
    found += [short for short, full in SHORT_FORMS.items() if full == key]
    found += [other for other, prefix in OTHER_SPELLINGS.items() if SHORT_FORMS.get(prefix) == key]
    return tuple(found)
