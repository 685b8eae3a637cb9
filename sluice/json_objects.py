"""Texts of JSON objects that a caller or a policy wrote: not large, and not nested deep."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

MAX_JSON_LEVELS = 32
MAX_ARGUMENTS_BYTES = 1 << 20
"""Of a tool call."""
MAX_CALLS, MAX_TOOL_NAME_BYTES = 128, 64
TOOL_NAME = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_TOOL_NAME_BYTES}}}")
"""What tools may be called."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises for bytes that someone else wrote."""
_SHOWN_CHARACTERS = 60


def shown(text: str) -> str:
    """Return the beginning of a text as errors show it: on one line."""
    return f"{text[:_SHOWN_CHARACTERS]!r}{'…' if len(text) > _SHOWN_CHARACTERS else ''}"


def problem_of_object(text: str, max_bytes: int) -> str:
    """Return why a text is not accepted as a JSON object, with the remedy; empty: it is.

    It takes time in proportion to the text, whatever that is.
    """
    # Every character takes at least one byte, so a long text is refused without encoding it.
    size = len(text) if len(text) > max_bytes else len(text.encode(errors="replace"))
    if size > max_bytes:
        return f"{shown(text)} has {size} bytes or more; send at most {max_bytes}"
    try:
        value = msgspec.json.decode(text)
    except (*DECODE_ERRORS, ValueError) as error:
        return f"{shown(text)} is not JSON ({str(error)[:100]}); send the text of an object"
    if not isinstance(value, dict):
        return f"{shown(text)} is no object; send one, such as {{}}"
    # Level by level: no text can exhaust the stack.
    level: list[object] = [value]
    for _ in range(MAX_JSON_LEVELS + 1):
        level = [inner for node in level for inner in _children(node)]
        if not level:
            return ""
    return f"{shown(text)} is more than {MAX_JSON_LEVELS} levels deep; flatten it"


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
