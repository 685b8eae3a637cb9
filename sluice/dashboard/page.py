"""The page without HTTP: its files, its access rules, its queries, and its data as JSON."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

from sluice.config.addresses import bare_host, split_host_port
from sluice.dashboard.curves import MIN_POINTS
from sluice.dashboard.sample_browser import GroupPage, ListedGroup, PageCursor, SampleFilter
from sluice.dashboard.sample_lines import ShownOutcome
from sluice.errors import ConfigError, InvalidRequestError
from sluice.rpc.metadata import AUTHORIZATION, presented_token
from sluice.security.token_file import TokenSource, role_of
from sluice.telemetry.samples import SampledResponse

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # No script can assign text as markup, not even ours.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""Headers of every answer. Texts of models and prompts are hostile."""
MAX_POINTS, USUAL_POINTS = 2000, 400
MAX_GROUPS, USUAL_GROUPS = 100, 25
MAX_TEXT_CHARS = 200
_MAX_SHOWN_CHARS = 40
_NumberT = TypeVar("_NumberT", int, float)
Query = Mapping[str, str]
_EXCERPT_CHARS = 160


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file with the headers of its answer."""

    body: bytes
    content_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """Return the files by path; ``/`` is the page. The server looks up no other path on disk."""
    by_path = {}
    for entry in (files("sluice.dashboard") / "static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            body = entry.read_bytes()
            path = "/" if entry.name == _INDEX else f"/static/{entry.name}"
            by_path[path] = PageFile(body, _TYPES[suffix], etag_of(body))
    return by_path


def etag_of(body: bytes) -> str:
    """Return a quoted digest of the bytes."""
    return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'


def policy_source(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows just this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def is_loopback_name(host: str) -> bool:
    """Return whether a ``Host`` header names the loopback interface of this machine.

    Another site may point its own name at this server (DNS rebinding); its requests carry that
    name.
    """
    try:
        name, _ = split_host_port(host)
    except ConfigError:
        return False
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare_host(name)).is_loopback
    except ValueError:
        return False


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether the browser declares a request as one from a page of another site."""
    return headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}


def admits(tokens: TokenSource | None, authorization: str) -> bool:
    """Return whether an ``Authorization`` header has one of the tokens; ``None`` admits all."""
    if tokens is None:
        return True
    presented = presented_token([(AUTHORIZATION, authorization)])
    return presented is not None and role_of(tokens.tokens(), presented) is not None


def parse_points(query: Query) -> int:
    """Return the maximum of points in a curve. Raises InvalidRequestError."""
    points = _integer(query, "points", MIN_POINTS, MAX_POINTS)
    return USUAL_POINTS if points is None else points


def parse_page_size(query: Query) -> int:
    """Return the maximum of groups in a page. Raises InvalidRequestError."""
    size = _integer(query, "most", 1, MAX_GROUPS)
    return USUAL_GROUPS if size is None else size


def parse_metric(query: Query) -> str:
    """Return the name of a metric. Raises InvalidRequestError."""
    name = parse_text(query, "name")
    if not name:
        raise InvalidRequestError("name: is missing; give the name of a metric of metrics.jsonl")
    return name


def parse_text(query: Query, name: str) -> str:
    """Return a text; empty: there is none. Raises InvalidRequestError."""
    text = query.get(name, "")
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"{name}: has {len(text)} characters; give at most {MAX_TEXT_CHARS}"
        )
    return text


def parse_filter(query: Query) -> SampleFilter:
    """Return the filter of the groups. Raises InvalidRequestError."""
    largest = 2**31 - 1
    outcomes = [name for name in query.get("outcome", "").split(",") if name]
    by_name = {outcome.value: outcome for outcome in ShownOutcome}
    for name in outcomes:
        if name not in by_name:
            raise InvalidRequestError(
                f"outcome: {_quote(name)} is not an outcome; give some of {', '.join(by_name)}"
            )
    return SampleFilter(
        frozenset(by_name[name] for name in outcomes),
        _integer(query, "first_step", 0, largest),
        _integer(query, "last_step", 0, largest),
        _number(query, "least_score"),
        _number(query, "most_score"),
    )


def parse_cursor(query: Query) -> PageCursor | None:
    """Return the end of the previous page. Raises InvalidRequestError."""
    text = query.get("after", "")
    if not text:
        return None
    step, dot, ordinal = text.partition(".")
    if not (dot and _is_count(step) and _is_count(ordinal)):
        raise InvalidRequestError(f"after: {_quote(text)} is not a position; give `next` of a page")
    return PageCursor(int(step), int(ordinal))


def cursor_text(cursor: PageCursor | None) -> str | None:
    """Return a cursor as `parse_cursor` reads it; ``None`` for the end of the list."""
    return None if cursor is None else f"{cursor.step}.{cursor.ordinal}"


def parse_ordinal(text: str) -> int:
    """Return the number of a group. Raises InvalidRequestError."""
    if not _is_count(text):
        raise InvalidRequestError(f"group: {_quote(text)} is not the number of a group")
    return int(text)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15


def _integer(query: Query, name: str, minimum: int, maximum: int) -> int | None:
    value = _parse_optional(query, name, int)
    if value is not None and not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name}: {value} is out of range; give {minimum} to {maximum}")
    return value


def _number(query: Query, name: str) -> float | None:
    value = _parse_optional(query, name, float)
    if value is not None and not math.isfinite(value):
        raise InvalidRequestError(f"{name}: {value} is not a finite number")
    return value


def _parse_optional(query: Query, name: str, parse: Callable[[str], _NumberT]) -> _NumberT | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        return parse(text[:_MAX_SHOWN_CHARS])
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {_quote(text)} is not a number") from error


def _quote(text: str) -> str:
    return repr(text[:_MAX_SHOWN_CHARS])


def page_object(page: GroupPage, counts: dict[str, int]) -> dict[str, Any]:
    """Return a page of the list as JSON.

    Args:
        page: some groups.
        counts: all indexed groups by outcome.
    """
    return {
        "groups": [_row_object(group) for group in page.groups],
        "next": cursor_text(page.next),
        "num_matching": page.num_matching,
        "num_searched": page.num_searched,
        "counts": counts,
    }


def group_object(listed: ListedGroup) -> dict[str, Any]:
    """Return a group with all of its texts as JSON."""
    group = listed.group
    return {
        **_row_object(listed),
        "prompt": group.prompt,
        "ground_truth": group.ground_truth,
        "data_source": group.data_source,
        "environment": group.environment,
        "replicas": group.replicas,
        "ended_at": group.ended_at or None,
        "responses": [_response_object(response) for response in group.responses],
    }


def _row_object(listed: ListedGroup) -> dict[str, Any]:
    lines, group = listed.entry.lines, listed.group
    is_validation = lines.outcome is ShownOutcome.VALIDATION
    versions = [v for response in group.responses for v in response.versions or ()]
    return {
        "id": listed.entry.ordinal,
        "prompt_id": group.prompt_id,
        "step": lines.step,
        "outcome": lines.outcome.value,
        "is_trained": group.step is not None,
        "versions": _version_range(versions, group.version, is_validation=is_validation),
        "mean_score": None if math.isnan(lines.mean_score) else round(lines.mean_score, 4),
        "scores": [response.score for response in group.responses],
        "excerpt": group.prompt[:_EXCERPT_CHARS],
    }


def _version_range(versions: list[int], announced: int, *, is_validation: bool) -> list[int] | None:
    """Return the oldest and newest version that sampled a token, if they are known."""
    if versions:
        return [min(versions), max(versions)]
    return [announced, announced] if is_validation else None


def _response_object(response: SampledResponse) -> dict[str, Any]:
    turns = [msgspec.structs.asdict(turn) for turn in response.turns]
    return {**msgspec.structs.asdict(response), "turns": turns}
