"""What a page asks for: the query of an address, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from sluice.dashboard.downsampling import FEWEST_POINTS
from sluice.dashboard.sample_index import Cursor, SampleFilter
from sluice.dashboard.sample_lines import ShownOutcome
from sluice.errors import InvalidRequestError

__all__ = ["asked_cursor", "asked_filter", "asked_page_size", "asked_points", "asked_text"]

MOST_POINTS, USUAL_POINTS = 2000, 400
MOST_GROUPS, USUAL_GROUPS = 100, 25
MOST_TEXT_CHARS = 200
_MOST_SHOWN = 40
_NumberT = TypeVar("_NumberT", int, float)

Query = Mapping[str, str]


def asked_points(query: Query) -> int:
    """Points of a curve. Raises InvalidRequestError."""
    found = _integer(query, "points", FEWEST_POINTS, MOST_POINTS)
    return USUAL_POINTS if found is None else found


def asked_page_size(query: Query) -> int:
    """Groups of a page. Raises InvalidRequestError."""
    found = _integer(query, "most", 1, MOST_GROUPS)
    return USUAL_GROUPS if found is None else found


def asked_text(query: Query) -> str:
    """What has to be in a prompt or response; empty: anything. Raises InvalidRequestError."""
    text = query.get("text", "")
    if len(text) > MOST_TEXT_CHARS:
        raise InvalidRequestError(
            f"text: has {len(text)} characters; give at most {MOST_TEXT_CHARS}"
        )
    return text


def asked_filter(query: Query) -> SampleFilter:
    """Which groups. Raises InvalidRequestError."""
    largest = 2**31 - 1
    outcomes = [name for name in query.get("outcome", "").split(",") if name]
    known = {outcome.value: outcome for outcome in ShownOutcome}
    for name in outcomes:
        if name not in known:
            raise InvalidRequestError(
                f"outcome: {_shown(name)} is none; give some of {', '.join(known)}"
            )
    return SampleFilter(
        frozenset(known[name] for name in outcomes),
        _integer(query, "first_step", 0, largest),
        _integer(query, "last_step", 0, largest),
        _number(query, "least_score"),
        _number(query, "most_score"),
    )


def asked_cursor(query: Query) -> Cursor | None:
    """Where the page before ended. Raises InvalidRequestError."""
    text = query.get("after", "")
    if not text:
        return None
    step, dot, ordinal = text.partition(".")
    if not (dot and _is_count(step) and _is_count(ordinal)):
        raise InvalidRequestError(f"after: {_shown(text)} is no place; give `next` of a page")
    return Cursor(int(step), int(ordinal))


def cursor_text(cursor: Cursor | None) -> str | None:
    """The other way round; ``None`` for the end of the list."""
    return None if cursor is None else f"{cursor.step}.{cursor.ordinal}"


def asked_ordinal(text: str) -> int:
    """The number of a group. Raises InvalidRequestError."""
    if not _is_count(text):
        raise InvalidRequestError(f"group: {_shown(text)} is no number of a group")
    return int(text)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


def _integer(query: Query, name: str, least: int, most: int) -> int | None:
    value = _parsed(query, name, int)
    if value is not None and not least <= value <= most:
        raise InvalidRequestError(f"{name}: {value} is not from {least} to {most}")
    return value


def _number(query: Query, name: str) -> float | None:
    value = _parsed(query, name, float)
    if value is not None and not math.isfinite(value):
        raise InvalidRequestError(f"{name}: {value} is no finite number")
    return value


def _parsed(query: Query, name: str, parse: Callable[[str], _NumberT]) -> _NumberT | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        return parse(text[:_MOST_SHOWN])
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {_shown(text)} is no number") from error


def _shown(text: str) -> str:
    return repr(text[:_MOST_SHOWN])
