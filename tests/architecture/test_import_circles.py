"""No module needs itself: imports that only type checkers read count too."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT, python_files, syntax_tree


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, known: frozenset[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def import_graph() -> Mapping[str, set[str]]:
    trees = {module_name(path): syntax_tree(path) for path in python_files("sluice", "services")}
    known = frozenset(trees)
    return {name: imported(tree, known) - {name} for name, tree in trees.items()}


def test_no_import_leads_back_to_where_it_started() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail("imports in a circle: " + " -> ".join(error.args[1]))


def test_an_import_for_type_checkers_counts() -> None:
    code = "if TYPE_CHECKING:\n    from a.b import C\n    from a import d\nimport e"
    known = frozenset({"a.b", "a.d", "e", "f"})
    assert imported(ast.parse(code), known) == {"a.b", "a.d", "e"}
