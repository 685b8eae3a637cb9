"""Folders, files and functions stay within their budgets; files are named after one concept."""

from __future__ import annotations

import ast
from collections import Counter

from tests.support.source_tree import ROOT, functions, name_of, python_files, syntax_tree

MAX_FOLDER_MODULES = 20
MAX_FILE_LINES = 600  # not blank; for one state machine or one algorithm
MAX_FUNCTION_LINES = 60
# Names under which unrelated things gather until everything imports everything.
HOMELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "shared", "stuff"}
ALL_FILES = python_files("sluice", "services", "tools", "benchmarks", "tests")
SOURCES = python_files()


def test_a_folder_holds_at_most_20_modules() -> None:
    modules = (path for path in SOURCES if path.name != "__init__.py")
    folders = Counter(name_of(path.parent) for path in modules)
    wide = {name: count for name, count in folders.items() if count > MAX_FOLDER_MODULES}
    assert not wide, "give them sub-packages, each with a name and a purpose"


def test_a_file_has_at_most_600_lines() -> None:
    long = {
        name_of(path): lines
        for path in ALL_FILES
        if (lines := _num_lines(path.read_text(encoding="utf-8"))) > MAX_FILE_LINES
    }
    assert not long, "split them by concept"


def _num_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def test_a_function_is_at_most_60_lines_long() -> None:
    long = {
        f"{name_of(path)}:{function.name}": length
        for path in ALL_FILES
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long


def test_a_file_is_named_after_its_concept() -> None:
    homeless = [
        name_of(path)
        for path in ALL_FILES
        if {path.stem, *path.relative_to(ROOT).parts[:-1]} & HOMELESS_NAMES
    ]
    assert not homeless, "name them after the concept they hold"


def test_a_source_file_opens_with_a_docstring() -> None:
    silent = [name_of(path) for path in SOURCES if not ast.get_docstring(syntax_tree(path))]
    assert not silent, "say in a sentence what they are"


def test_test_files_have_unique_names() -> None:
    names = Counter(path.name for path in python_files("tests") if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
