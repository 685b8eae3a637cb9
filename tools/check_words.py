"""Report words that the glossary replaced: path, line, word, and what to write instead.

Covers the product, the tests, the tools, the benchmarks, the protos and the documentation, or the
places that it is given. Exits with 1 if there are any. The words are in `tools/old_words.toml`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
WORD_FILE = ROOT / "tools" / "old_words.toml"
PRODUCT = ("sluice", "services")
DOCUMENTATION = ("proto", "docs", "README.md", "CONTRIBUTING.md")
COVERED = (*PRODUCT, *DOCUMENTATION, "tests", "tools", "benchmarks")
SUFFIXES = {".py", ".proto", ".md", ".toml", ".yaml", ".jinja", ".js", ".mjs", ".css", ".html"}
# Generated from proto/, other people's code, and the list itself.
LEFT_OUT = ("sluice/api/*", "*/node_modules/*", "*.min.*", "tools/old_words.toml")
# Identifiers count as the words they are made of.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# What may stand between the words of a phrase: `_`, or a break of line, comment or string.
_GAP = re.compile(r"[\s_\"'#/*\\-]*")


class OldWord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A word or phrase in all its forms, its replacement, and where it is right."""

    old: tuple[str, ...]
    new: str
    allowed_files: tuple[str, ...] = ()
    allowed_phrases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of an old word; `path` is relative to the root of the repository."""

    path: str
    line: int
    found: str
    word: OldWord


class WordList(msgspec.Struct, frozen=True):
    """The old words, and the files that may use any of them."""

    words: tuple[OldWord, ...]
    exempt_files: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path = WORD_FILE) -> WordList:
        """Read the TOML file; an unknown key is an error."""
        return msgspec.toml.decode(path.read_bytes(), type=cls)

    def find(self, path: str, text: str) -> Iterator[Finding]:
        """Yield every use of an old word in the text of a file, from top to bottom."""
        if _matches(path, self.exempt_files):
            return
        starts: dict[str, list[tuple[tuple[str, ...], OldWord]]] = {}
        for word in self.words:
            if not _matches(path, word.allowed_files):
                for form in (tuple(form.lower().split()) for form in word.old):
                    starts.setdefault(form[0], []).append((form, word))
        tokens = [(match[0].lower(), *match.span()) for match in _WORD.finditer(text)]
        for index, (first, start, _) in enumerate(tokens):
            for form, word in starts.get(first, ()):
                end = _end_of(form, tokens[index : index + len(form)], text)
                if end is not None and not _is_allowed(word, text, start):
                    found = " ".join(text[start:end].split())
                    yield Finding(path, text.count("\n", 0, start) + 1, found, word)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _end_of(form: tuple[str, ...], tokens: list[tuple[str, int, int]], text: str) -> int | None:
    """Return where the form ends if the tokens spell it out, with only gaps between them."""
    if form != tuple(token[0] for token in tokens):
        return None
    for (_, _, end), (_, start, _) in itertools.pairwise(tokens):
        if not _GAP.fullmatch(text, end, start):
            return None
    return tokens[-1][2]


def _is_allowed(word: OldWord, text: str, start: int) -> bool:
    for phrase in word.allowed_phrases:
        pattern = re.compile(r"\s+".join(map(re.escape, phrase.split())), re.IGNORECASE)
        around = pattern.finditer(text, max(0, start - 200), start + 200)
        if any(match.start() <= start < match.end() for match in around):
            return True
    return False


def text_files(*places: str) -> Iterator[Path]:
    """Yield the files with text of ours at or below the places, in order."""
    for place in places:
        top = ROOT / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and path.is_file() and not _matches(name, LEFT_OUT):
                yield path


def find_old_words(*places: str) -> list[Finding]:
    """Return every use of an old word at or below the places."""
    words = WordList.read()
    return [
        finding
        for path in text_files(*places)
        for finding in words.find(
            path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        )
    ]


def main() -> int:
    """Print the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("places", nargs="*", help="files and folders; default: all it covers")
    findings = find_old_words(*(parser.parse_args().places or COVERED))
    for one in findings:
        sys.stdout.write(f"{one.path}:{one.line}: {one.found} -> {one.word.new}\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
