r"""Content of ``\boxed{...}``, the usual mark of a final answer."""

from __future__ import annotations

OPENING = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``; ``None`` if there is none or its braces stay open."""
    start = text.rfind(OPENING)
    return None if start < 0 else braced(text, start + len(OPENING) - 1)


def braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; ``None`` if it has none."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1 : end]
    return None
