"""One row of the catalogue: what sluice does with a configuration key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypedDict, Unpack


class KeyStatus(StrEnum):
    """What becomes of a key's value."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    NOT_APPLICABLE = "not applicable"
    REFUSED = "refused"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for a default that the schema gives, or for a value that was never set."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values that do not do what they ask for, with reason and remedy as half a sentence."""

    applies: Callable[[object], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of the catalogue.

    A key that the typed schema holds takes `meaning`, `annotation` and `default` from there and
    leaves them out here. Any other key is checked against `annotation` and not kept.

    Attributes:
        path: dotted, in the spelling that all others are turned into.
        status: what becomes of the value.
        instead: for MAPPED the conversion, for NOT_APPLICABLE what happens instead, for REFUSED
            why; it ends a sentence that starts with the key.
        targets: the keys of the schema that a MAPPED key sets.
        verl_default: verl's default where it differs from ours.
        silent: values that ask for what happens anyway and so need no notice.
        refusals: values that are errors.
        caveats: values that are taken although nothing here does what they ask for.
        is_block: any keys may stand below; they share this row.
        engines: the only ones that read the key; empty: whichever runs, the key is read.
    """

    path: str
    status: KeyStatus = KeyStatus.HONOURED
    meaning: str = ""
    annotation: object = None
    default: object = ABSENT
    unit: str = ""
    effect: str = ""
    advice: str = ""
    instead: str = ""
    targets: tuple[str, ...] = ()
    verl_default: str | None = None
    silent: tuple[object, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    caveats: tuple[Refusal, ...] = ()
    is_block: bool = False
    engines: tuple[str, ...] = ()

    @property
    def in_schema(self) -> bool:
        """Whether the typed schema holds the key, with its type, default and meaning."""
        return self.annotation is None


def refused_unless(accepted: object, reason: str) -> tuple[Refusal, ...]:
    """Every value but `accepted` (and null) is an error."""
    return (Refusal(lambda value: value is not None and value != accepted, reason),)


def refused_if(refused: object, reason: str) -> tuple[Refusal, ...]:
    """The one value `refused` is an error."""
    return (Refusal(lambda value: value == refused, reason),)


def refused_prefix(prefix: str, reason: str) -> tuple[Refusal, ...]:
    """Texts, or lists with a text, that start with `prefix` are errors."""

    def applies(value: object) -> bool:
        texts = value if isinstance(value, list) else [value]
        return any(isinstance(text, str) and text.startswith(prefix) for text in texts)

    return (Refusal(applies, reason),)


class Texts(TypedDict, total=False):
    """Attributes of `Entry` that the functions below take by name."""

    unit: str
    effect: str
    advice: str
    targets: tuple[str, ...]
    verl_default: str | None
    silent: tuple[object, ...]
    refusals: tuple[Refusal, ...]
    caveats: tuple[Refusal, ...]
    engines: tuple[str, ...]


def honoured(path: str, **more: Unpack[Texts]) -> Entry:
    """A key of the schema that means here what it means in verl."""
    return Entry(path, **more)


def unread(path: str, instead: str, **more: Unpack[Texts]) -> Entry:
    """A key of the schema that no service reads; its value is checked, and kept for estimates."""
    return Entry(path, KeyStatus.NOT_APPLICABLE, instead=instead, **more)


def inapplicable(
    path: str,
    annotation: object,
    default: object,
    meaning: str,
    instead: str,
    **more: Unpack[Texts],
) -> Entry:
    """A key outside the schema that has no effect here."""
    return Entry(
        path, KeyStatus.NOT_APPLICABLE, meaning, annotation, default, instead=instead, **more
    )


def mapped(
    path: str,
    annotation: object,
    default: object,
    meaning: str,
    instead: str,
    **more: Unpack[Texts],
) -> Entry:
    """A key outside the schema whose value is turned into those of other keys."""
    return Entry(path, KeyStatus.MAPPED, meaning, annotation, default, instead=instead, **more)


def refused(path: str, annotation: object, default: object, meaning: str, instead: str) -> Entry:
    """A key outside the schema that may only keep its default; `instead` is the reason."""
    return Entry(
        path,
        KeyStatus.REFUSED,
        meaning,
        annotation,
        default,
        instead=instead,
        silent=(default, None),
        refusals=refused_unless(default, instead),
    )


def block(path: str, meaning: str, instead: str) -> Entry:
    """A subtree of keys, all without effect here, that are not looked at one by one."""
    return Entry(
        path, KeyStatus.NOT_APPLICABLE, meaning, object, {}, instead=instead, is_block=True
    )


def group(
    prefix: str, defaults: Mapping[str, object], meaning: str, instead: str
) -> tuple[Entry, ...]:
    """Keys below `prefix` that share a row's words; their types are those of their defaults."""
    return tuple(
        inapplicable(
            f"{prefix}.{name}",
            object if default is None else type(default),
            default,
            meaning,
            instead,
            silent=(default,),
        )
        for name, default in defaults.items()
    )


def below(prefix: str, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries with `prefix` before their paths and targets."""
    return tuple(
        replace(
            entry,
            path=f"{prefix}.{entry.path}",
            targets=tuple(f"{prefix}.{target}" for target in entry.targets),
        )
        for entry in entries
    )
