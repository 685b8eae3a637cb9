"""Files that a program writes from the code: write them, or check that they are current."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def write_or_check(files: Mapping[Path, str], arguments: Sequence[str], module: str) -> int:
    """Write the files; with ``--check`` write nothing and return 1 if one is not current.

    Args:
        files: the fresh content of each.
        arguments: of the command line.
        module: that writes them, for `python -m`.
    """
    names = ", ".join(file.name for file in files)
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Write {names}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    if not parser.parse_args(arguments).check:
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return 0
    stale = [file.name for file, text in files.items() if not _holds(file, text)]
    if stale:
        sys.stderr.write(f"{', '.join(stale)}: not current; run python -m {module}\n")
    return bool(stale)


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown; a cell becomes one line, and its bars are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", "\\|"))
