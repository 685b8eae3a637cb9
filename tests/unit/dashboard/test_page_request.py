"""What an address may ask for, and who may ask."""

from __future__ import annotations

from functools import partial

import pytest

from sluice.dashboard.page import (
    HEADERS,
    admits,
    cursor_text,
    is_cross_site,
    is_loopback_name,
    parse_cursor,
    parse_filter,
    parse_ordinal,
    parse_page_size,
    parse_points,
    parse_text,
)
from sluice.dashboard.sample_browser import PageCursor, SampleFilter
from sluice.dashboard.sample_lines import ShownOutcome
from sluice.errors import InvalidRequestError
from sluice.security.token_file import GivenToken

TOKEN = "a-token-of-32-characters-or-more-0"


def test_without_a_query_everything_is_asked_for() -> None:
    assert parse_filter({}) == SampleFilter()
    assert parse_cursor({}) is None
    assert parse_text({}, "text") == ""
    assert (parse_points({}), parse_page_size({})) == (400, 25)


def test_a_query_is_read() -> None:
    query = {
        "outcome": "all wrong,stale",
        "first_step": "2",
        "last_step": "9",
        "least_score": "-0.5",
        "most_score": "1",
    }
    outcomes = frozenset({ShownOutcome.ALL_WRONG, ShownOutcome.STALE})
    assert parse_filter(query) == SampleFilter(outcomes, 2, 9, -0.5, 1.0)
    cursor = PageCursor(3, 41)
    assert parse_cursor({"after": cursor_text(cursor) or ""}) == cursor


@pytest.mark.parametrize(
    ("ask", "query", "name"),
    [
        (parse_filter, {"outcome": "kept,<b>"}, "outcome"),
        (parse_filter, {"first_step": "-1"}, "first_step"),
        (parse_filter, {"last_step": "9" * 30}, "last_step"),
        (parse_filter, {"least_score": "nan"}, "least_score"),
        (parse_filter, {"most_score": "inf"}, "most_score"),
        (parse_filter, {"most_score": "one"}, "most_score"),
        (parse_points, {"points": "3"}, "points"),
        (parse_points, {"points": "1000000"}, "points"),
        (parse_page_size, {"most": "0"}, "most"),
        (parse_cursor, {"after": "1"}, "after"),
        (parse_cursor, {"after": "1.²"}, "after"),
        (parse_cursor, {"after": f"1.{'9' * 99}"}, "after"),
        (partial(parse_text, name="text"), {"text": "x" * 201}, "text"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(ask: object, query: object, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: "):
        ask(query)  # type: ignore[operator]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "../1", "1" * 16])
def test_a_groups_number_is_a_number(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_ordinal(text)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:80", "LOCALHOST.", "127.0.0.1:8080", "127.8.0.1", "[::1]:1"]
)
def test_names_of_the_loopback_interface_are_answered(host: str) -> None:
    assert is_loopback_name(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example:80",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0.0.0.0",
    ],
)
def test_a_name_that_was_made_to_lead_here_is_not(host: str) -> None:
    assert not is_loopback_name(host)


def test_only_a_page_of_the_same_site_or_a_person_is_answered() -> None:
    assert not is_cross_site({})
    assert not is_cross_site({"Sec-Fetch-Site": "same-origin"})
    assert not is_cross_site({"Sec-Fetch-Site": "none"})
    assert is_cross_site({"Sec-Fetch-Site": "cross-site"})
    assert is_cross_site({"Sec-Fetch-Site": "same-site"})


def test_a_token_admits_and_nothing_else_does() -> None:
    source = GivenToken(TOKEN, "a test")
    assert admits(None, "")
    assert admits(source, f"Bearer {TOKEN}")
    for given in ("", TOKEN, f"Basic {TOKEN}", "Bearer ", f"Bearer {TOKEN}x"):
        assert not admits(source, given)


def test_the_policy_allows_no_script_but_the_servers_own_files() -> None:
    rules = dict(rule.split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert HEADERS["X-Content-Type-Options"] == "nosniff"
