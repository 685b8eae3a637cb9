r"""LaTeX answers: the content of ``\boxed{...}``, and one normal form (the MATH data set's
normalisation; verl's strip_string).

The normal form is purely textual: ``0.5``, ``1/2`` and ``\frac12`` become ``\frac{1}{2}``, but
``0.25`` stays.
"""

from __future__ import annotations

import re

OPENING = "\\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``; ``None`` if there is none or its braces are
    not closed."""
    start = text.rfind(OPENING)
    return None if start < 0 else braced_text(text, start + len(OPENING) - 1)


def braced_text(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing brace; ``None`` without one."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1 : end]
    return None


_DRESS = (
    ("\n", ""),
    (r"\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),
    (r"^\circ", ""),
    (r"\$", ""),
)
_LEADING_POINT = ((" .", " 0."), ("{.", "{0."))
_UNIT = r"\text{ "
_INTEGER_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
_MAX_NAME_CHARS = 2


class MalformedLatexError(ValueError):
    """The answer has no normal form: a command lacks its argument, or there are two units."""


def normal_form(answer: str) -> str:
    r"""Return `answer` in normal form: without spaces, units, degrees, percent, ``x=`` and
    shorthand.

    Raises:
        MalformedLatexError: ``\frac`` or ``\sqrt`` without argument, or two ``\text{ unit}``.
    """
    for old, new in _DRESS:
        answer = answer.replace(old, new)
    answer = _without_unit(answer).replace(r"\\%", "").replace(r"\%", "")
    for old, new in _LEADING_POINT:
        answer = answer.replace(old, new)
    if answer.startswith("."):
        answer = "0" + answer
    answer = _braced_roots(_right_side(answer)).replace(" ", "")
    answer = _braced_fractions(answer)
    if answer == "0.5":
        return r"\frac{1}{2}"
    ratio = _INTEGER_RATIO.fullmatch(answer)
    return rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else answer


def same_answer(answer: str, reference: str) -> bool:
    """Return whether both have the same normal form or, if one has none, the same text."""
    try:
        return normal_form(answer) == normal_form(reference)
    except MalformedLatexError:
        return answer == reference


def _without_unit(answer: str) -> str:
    number, *units = answer.split(_UNIT)
    if len(units) > 1:
        raise MalformedLatexError(f"two units in {answer!r:.80}")
    return number


def _right_side(answer: str) -> str:
    """Drop the name of ``x = 5``, not the left side of an equation."""
    sides = answer.split("=")
    return sides[1] if len(sides) == 2 and len(sides[0]) <= _MAX_NAME_CHARS else answer


def _braced_roots(answer: str) -> str:
    head, *parts = answer.split(r"\sqrt")
    return head + "".join(rf"\sqrt{_braced_first(part)}" for part in parts)


def _braced_first(part: str) -> str:
    if not part:
        raise MalformedLatexError(r"\sqrt without argument")
    return part if part.startswith("{") else f"{{{part[0]}}}{part[1:]}"


def _braced_fractions(answer: str) -> str:
    head, *parts = answer.split(r"\frac")
    spelled = [head]
    for part in parts:
        if not part:
            raise MalformedLatexError(r"\frac without argument")
        if part.startswith("{"):
            spelled.append(part)
        elif len(part) == 1:  # one argument only: verl leaves the whole answer as it is
            return answer
        elif part[1] == "{":
            spelled.append(f"{{{part[0]}}}{part[1:]}")
        else:
            spelled.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return r"\frac".join(spelled)
