"""Untrusted text made safe for terminals and logs, and for what encodes it; settings without their
secrets.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

_SECRET_NAME = re.compile(
    r"(?:^|\.)(?!(?i:(?:\w+_)?(?:bos|cls|end|eos|image|mask|max|min|pad|per|sep|start|stop|think|unk"
    r"|video)_token$))[^.]*(?:KEY|TOKEN|(?i:(?:access|api|auth|encryption|openai|private|secret"
    r"|signing)[-_]?key|credentials?|passphrase|passw(?:or)?d|pwd|secret|(?<![^._-])token))$"
)
"""A dotted key whose value is a secret; that of a ``prompt_key`` is a column."""
HIDDEN = "(hidden)"

_KEPT = "\n\t"
_UNSAFE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Format characters that only join or shape letters.
_HARMLESS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}\N{SOFT HYPHEN}"


def printable(text: str) -> str:
    r"""Return `text` with escapes in place of characters that a terminal would obey.

    Control characters (escape sequences begin with one) and those that reorder or hide text become
    escapes like ``\x1b``; newlines and tabs stay.
    """
    return "".join(
        character if _is_safe(character) else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _is_safe(character: str) -> bool:
    if character in _KEPT or character in _HARMLESS:
        return True
    return unicodedata.category(character) not in _UNSAFE_CATEGORIES


def encodable(text: str) -> str:
    """Return `text` with a mark in place of what UTF-8 and JSON cannot hold: half a surrogate pair
    would end the process that sends or writes it."""
    return text.encode(errors="replace").decode()


def without_secrets(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by dotted key, with `HIDDEN` for each secret: what shows them is shared."""
    return {
        key: HIDDEN if value and _SECRET_NAME.search(key) else _hide_secrets(value)
        for key, value in settings.items()
    }


def _hide_secrets(value: object) -> object:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_hide_secrets(item) for item in value] if isinstance(value, list) else value
