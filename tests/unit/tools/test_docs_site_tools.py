"""What mends links for the site, fills the nav, and finds what is wrong on a built one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs_site.built_site import problems
from tools.docs_site.hooks import expanded_nav, nav_pages, with_site_links

URL = "https://forge.example/sluice/blob/main"


@pytest.mark.parametrize(
    ("source", "link", "mended"),
    [
        ("a.md", "[b](b.md#c)", "[b](b.md#c)"),
        ("reference/a.md", "[b](../b.md)", "[b](../b.md)"),
        ("a.md", "[e](https://elsewhere.example/)", "[e](https://elsewhere.example/)"),
        ("a.md", "[`x.py`](../sluice/x.py)", f"[`x.py`]({URL}/sluice/x.py)"),
        ("reference/a.md", "[x](../../proto)", f"[x]({URL}/proto)"),
        ("a.md", "[r](../README.md)", "[r](index.md)"),
        ("deployment/a.md", "[r](../../README.md#x)", "[r](../index.md)"),
        ("a.md", "[c](../CONTRIBUTING.md#tests)", f"[c]({URL}/CONTRIBUTING.md#tests)"),
    ],
)
def test_links_that_leave_the_site_lead_to_the_repository(
    source: str, link: str, mended: str
) -> None:
    assert with_site_links(f"see {link}.", source, URL) == f"see {mended}."


def test_without_a_repository_a_link_is_a_word_that_shows_the_path() -> None:
    found = with_site_links("[`x`](../sluice/x.py)", "a.md", "")
    assert found == '<span title="sluice/x.py">`x`</span>'


def test_blocks_of_code_stay_as_they_are() -> None:
    text = "```python\n[x](../sluice/x.py)\n```\n"
    assert with_site_links(text, "a.md", "") == text


def test_a_folder_in_the_nav_stands_for_its_pages(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a.md", "more/c.md", "more/b.md"):
        (tmp_path / name).write_text("# x\n", encoding="utf-8")
    nav = expanded_nav([{"A": "a.md"}, {"All": [{"More": "more/"}]}], tmp_path)
    assert nav_pages(nav) == ["a.md", "more/b.md", "more/c.md"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / "own.js").write_text("", encoding="utf-8")
    (tmp_path / "b" / "index.html").write_text('<h1 id="top">b</h1>', encoding="utf-8")
    return tmp_path


def found(site: Path, body: str) -> list[str]:
    (site / "index.html").write_text(body, encoding="utf-8")
    return list(problems(site))


def test_a_sound_site_has_no_problems(site: Path) -> None:
    body = '<script src="own.js"></script><a href="b/#top">b</a><a href="https://e.example">e</a>'
    assert found(site, body) == []


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x">', "loads //fonts.example/x"),
        ('<script src="none.js"></script>', "loads none.js, which is not there"),
        ('<a href="c/">c</a>', "c/ leads nowhere"),
        ('<a href="b/#none">b</a>', "b/#none: no such place on that page"),
    ],
)
def test_what_is_wrong_is_named(site: Path, body: str, reported: str) -> None:
    assert found(site, body) == [f"index.html: {reported}"]
