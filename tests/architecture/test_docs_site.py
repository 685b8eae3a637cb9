"""The documentation site shows every page, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from tests.support.documents import blocks
from tests.support.source_tree import ROOT
from tools.docs_site.hooks import MERMAID_ON_SITE

DOCS = ROOT / "docs"
TEXT = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


class _Settings(yaml.SafeLoader):
    """Reads mkdocs' settings without what stands for Python objects in them."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SETTINGS = yaml.load(TEXT, _Settings)


def nav_pages(nav: Sequence[Any]) -> list[str]:
    """Return all pages of a nav, in order."""
    found: list[str] = []
    for item in nav:
        values = [item] if isinstance(item, str) else list(item.values())
        for value in values:
            found += [value] if isinstance(value, str) else nav_pages(value)
    return found


def test_every_page_is_in_the_nav_once_and_every_entry_is_a_page() -> None:
    pages = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert sorted(nav_pages(SETTINGS["nav"])) == pages


def test_warnings_are_errors() -> None:
    assert SETTINGS["strict"] is True
    assert set(SETTINGS["validation"].values()) == {"warn"}


def test_no_font_script_or_style_comes_from_elsewhere() -> None:
    assert SETTINGS["theme"]["font"] is False
    assert SETTINGS["extra_javascript"] == [MERMAID_ON_SITE]
    assert "://" not in TEXT
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^MERMAID_SHA256 := [0-9a-f]{64}$", makefile, re.MULTILINE)


def test_diagrams_are_rendered_by_the_file_that_the_site_brings() -> None:
    diagrams = [block for page in DOCS.rglob("*.md") for block in blocks(page, "mermaid")]
    assert diagrams
    # Mermaid reads a semicolon as the end of a line, also within a text.
    assert not [block for block in diagrams if ";" in block]
    superfences = next(
        one["pymdownx.superfences"]
        for one in SETTINGS["markdown_extensions"]
        if isinstance(one, dict) and "pymdownx.superfences" in one
    )
    assert [fence["name"] for fence in superfences["custom_fences"]] == ["mermaid"]


def test_pages_that_only_the_site_fills_in_name_modules_that_are_there() -> None:
    named = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(named) > 10
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name
