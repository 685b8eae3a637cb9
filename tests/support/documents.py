"""What the documents quote: commands, configuration keys, blocks of text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.support.source_tree import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_SHOWN = ("", "console", "bash", "sh", "text")
_OMITTED = ("…", "...")
_COMMENT = re.compile(r"\s#\s.*$")


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language, without their fences."""
    text = document.read_text(encoding="utf-8")
    return [body for name, body in _FENCE.findall(text) if name == language]


def commands(document: Path) -> list[list[str]]:
    """Every line that starts with ``sluice``, as words: of fenced blocks, and inline code.

    A prompt ``$`` is passed over, a line that ends in a backslash continues in the next. Words that
    stand for others (``…``, capitals) are left in.
    """
    return [words[1:] for line in _lines(document) if (words := _words(line))[:1] == ["sluice"]]


def _lines(document: Path) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    for language, body in _FENCE.findall(text):
        if language in _SHOWN:
            yield from body.replace("\\\n", " ").splitlines()
    for span in _INLINE.findall(_FENCE.sub("", text)):
        yield span.removeprefix("'").removesuffix("'")


def _words(line: str) -> list[str]:
    command = _COMMENT.sub("", line.strip().removeprefix("$ "))
    if not command.startswith("sluice "):
        return []
    return [word for word in shlex.split(command) if word not in _OMITTED]


def code_words(document: Path) -> Iterator[str]:
    """Words of inline code and of shown blocks, each stripped of a value behind ``=``."""
    for line in _lines(document):
        for word in re.split(r"[\s,;|()'\"\[\]]+", line):
            yield word.lstrip("+~@$").partition("=")[0].rstrip(".:")


def table_rows(document: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = document.read_text(encoding="utf-8")
    below = text[text.index(f"\n{heading}\n") :].splitlines()
    start = next(i for i, line in enumerate(below) if line.startswith("|---"))
    rows = []
    for line in below[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
