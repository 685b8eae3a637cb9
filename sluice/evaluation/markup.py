"""HTML from values. Every text is escaped: no response of a model is ever markup."""

from __future__ import annotations

import html
from dataclasses import dataclass

from sluice.safe_text import printable

_EMPTY_ELEMENTS = frozenset({"input", "meta"})


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already; only this module and constants of the code make any."""

    text: str


Child = Markup | str | int


def element(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    Args:
        name: of the element.
        children: texts are escaped; what would hide or reorder text becomes visible.
        attributes: names with ``_`` for ``-``, and ``class_`` for ``class``; ``None`` and False
            leave one out, and True gives it no value.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY_ELEMENTS:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children).text}</{name}>")


def joined(*children: Child) -> Markup:
    """Return all of them in one."""
    return Markup("".join(c.text if isinstance(c, Markup) else escaped(str(c)) for c in children))


def escaped(text: str) -> str:
    """Return a text that a browser shows as it is."""
    return html.escape(printable(text))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
