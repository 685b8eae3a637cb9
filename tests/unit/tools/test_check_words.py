"""What counts as a use of an old word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_words import WordList

WORDS = """
exempt_files = ["docs/glossary.md"]
[[words]]
old = ["goes on", "go on"]
new = "continues"
[[words]]
old = ["told"]
new = "reported"
allowed_files = ["docs/history*"]
allowed_phrases = ["told apart"]
"""


@pytest.fixture
def words(tmp_path: Path) -> WordList:
    path = tmp_path / "words.toml"
    path.write_text(WORDS, encoding="utf-8")
    return WordList.read(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = ToldText()\nself.is_told = _goes_on", ["1 Told", "2 told", "2 goes_on"]),
        ("# It goes\n# on: TOLD.", ["1 goes # on", "2 TOLD"]),
        ('"they go "\n"on"', ['1 go " "on']),
        ("untoldly, goes one, go: on", []),
        ("they are told\napart", []),
    ],
)
def test_old_words_are_found_in_identifiers_and_across_lines(
    words: WordList, text: str, found: list[str]
) -> None:
    assert [f"{one.line} {one.found}" for one in words.find("sluice/x.py", text)] == found


@pytest.mark.parametrize("path", ["docs/glossary.md", "docs/history.md"])
def test_a_word_is_allowed_in_the_files_the_list_names(words: WordList, path: str) -> None:
    assert list(words.find(path, "told")) == []
