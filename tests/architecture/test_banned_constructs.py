"""What no lint rule catches: stray tasks, swallowed cancellation, pickles by another name."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.source_tree import ROOT, dotted, name_of, python_files, syntax_tree

SOURCES = python_files()
Node = ast.Call | ast.ExceptHandler
Rule = Callable[[ast.AST], Iterator[Node]]
LOOP = re.compile(r"(^|[._])loop$|loop\(\)$")


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def handlers(tree: ast.AST) -> Iterator[ast.ExceptHandler]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))


def stray_tasks(tree: ast.AST) -> Iterator[Node]:
    """Tasks started on a loop or by asyncio itself, outside a TaskGroup."""
    for call in calls(tree):
        name = dotted(call.func)
        receiver, _, method = name.rpartition(".")
        if name in {"asyncio.create_task", "asyncio.ensure_future", "asyncio.gather"} or (
            method == "create_task" and LOOP.search(receiver)
        ):
            yield call


def suppressed_cancellation(tree: ast.AST) -> Iterator[Node]:
    for call in calls(tree):
        if dotted(call.func).rpartition(".")[2] == "suppress":
            names = {dotted(argument).rpartition(".")[2] for argument in call.args}
            if names & {"CancelledError", "BaseException"}:
                yield call


def swallowed_cancellation(tree: ast.AST) -> Iterator[Node]:
    """Handlers of CancelledError without a raise, and of BaseException that do nothing."""
    for handler in handlers(tree):
        caught = dotted(handler.type) if handler.type else "BaseException"
        raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
        idle = all(isinstance(node, ast.Pass | ast.Continue) for node in handler.body)
        if ("CancelledError" in caught and not raises) or ("BaseException" in caught and idle):
            yield handler


def allowed_pickles(tree: ast.AST) -> Iterator[Node]:
    for call in calls(tree):
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and dotted(keyword.value) != "False":
                yield call
            if keyword.arg == "weights_only":
                yield call


def parked_servers(tree: ast.AST) -> Iterator[Node]:
    """`wait_for_termination`: cancelled, it breaks the drain that should follow."""
    for call in calls(tree):
        if dotted(call.func).endswith(".wait_for_termination"):
            yield call


RULES = (
    stray_tasks,
    suppressed_cancellation,
    swallowed_cancellation,
    allowed_pickles,
    parked_servers,
)


# verl keeps its shards as pickles; they are read with `weights_only`, which runs no code.
EXCEPTIONS = {(allowed_pickles, "sluice/checkpoint/verl_shards.py")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_source_file_holds(rule: Rule) -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if (rule, name_of(path)) not in EXCEPTIONS
        for node in rule(syntax_tree(path))
    ]
    assert not found


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (stray_tasks, "asyncio.create_task(f())"),
        (stray_tasks, "self._loop.create_task(f())"),
        (stray_tasks, "asyncio.get_running_loop().create_task(f())"),
        (suppressed_cancellation, "with contextlib.suppress(asyncio.CancelledError): pass"),
        (suppressed_cancellation, "with suppress(ValueError, BaseException): pass"),
        (swallowed_cancellation, "try: f()\nexcept asyncio.CancelledError: log()"),
        (swallowed_cancellation, "try: f()\nexcept BaseException: pass"),
        (swallowed_cancellation, "try: f()\nexcept: pass"),
        (allowed_pickles, "np.load(path, allow_pickle=True)"),
        (allowed_pickles, "load(path, weights_only=True)"),
        (parked_servers, "server.wait_for_termination()"),
    ],
)
def test_the_rule_fires(rule: Rule, code: str) -> None:
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (stray_tasks, "group.create_task(f())"),
        (swallowed_cancellation, "try: f()\nexcept asyncio.CancelledError:\n  g()\n  raise"),
        (swallowed_cancellation, "try: f()\nexcept BaseException as e: deliver(e)"),
        (allowed_pickles, "np.load(path, allow_pickle=False)"),
    ],
)
def test_the_rule_lets_pass(rule: Rule, code: str) -> None:
    assert not list(rule(ast.parse(code)))


TEXT_FILES = [
    path
    for pattern in ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.proto", "Makefile")
    for folder in ("sluice", "services", "tools", "benchmarks", "tests", "docs", "proto")
    for path in sorted((ROOT / folder).rglob(pattern))
] + [path for path in sorted(ROOT.iterdir()) if path.suffix in {".md", ".toml", ".yaml", ".txt"}]
# In two parts, so that this file does not find itself.
MACHINE_PATHS = re.compile("/" + r"(?:work|root|home/[a-z]+)/" + r"[a-z.]")
PROMISES = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def test_no_file_names_a_place_on_one_machine_or_work_left_undone() -> None:
    found = [
        f"{name_of(path)}: {match[0]}"
        for path in TEXT_FILES
        for pattern in (MACHINE_PATHS, PROMISES)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
