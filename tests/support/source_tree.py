"""The repository's own files, for tests about the repository."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("sluice", "services", "tools", "benchmarks")
GENERATED = ROOT / "sluice" / "api"


def python_files(*folders: str) -> list[Path]:
    """Hand-written Python files below the named folders (all source folders by default)."""
    return sorted(
        path
        for folder in folders or SOURCE_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(GENERATED)
    )


def name_of(path: Path) -> str:
    """The path from the root of the repository, for messages and test ids."""
    return str(path.relative_to(ROOT))


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The parsed file; a search for garbage in what was parsed would take most of the time."""
    _collect_once()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()


@cache
def _collect_once() -> None:
    gc.collect()  # what is frozen is never found to be garbage


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file, nested ones included."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dotted(node: ast.expr) -> str:
    """A name or attribute chain as written; a call inside it keeps its brackets."""
    return ast.unparse(node)
