"""No key of the configuration is accepted, typed, and then read by nobody."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from sluice.config.catalogue.table import KeyStatus
from sluice.config.explain import explain_key
from sluice.config.run import RunConfig, field_types, section_type
from sluice.config.schema.section import Section
from tests.support.source_tree import ROOT, python_files, syntax_tree

Types = frozenset[str]
Names = dict[str, Types]

NOTHING: Types = frozenset()
ROUNDS = 4
"""Attributes may hold what was assigned from attributes of other classes."""


def attribute_reads(
    members: Mapping[str, Mapping[str, str]],
    trees: Iterable[ast.Module],
    declarations: Iterable[ast.Module] = (),
) -> set[tuple[str, str]]:
    """Pairs of class and attribute that are read.

    Args:
        members: class to its attributes, each with the class it holds, or "" for a plain value.
        trees: the code.
        declarations: modules whose annotations are followed, and whose reads do not count.
    """
    reader, modules = _Reader(members), list(trees)
    others = list(declarations)
    for tree in (*others, *modules):
        reader.classes |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for tree in others:
        reader.look_through(tree)
    reader.found.clear()
    for _ in range(ROUNDS):
        for tree in modules:
            reader.look_through(tree)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, members: Mapping[str, Mapping[str, str]]) -> None:
        self.classes, self.found = set(members), set[tuple[str, str]]()
        self._members = members
        self._attributes: dict[tuple[str, str], Types] = defaultdict(frozenset)
        self._results: dict[str, Types] = defaultdict(frozenset)
        for owner, held in members.items():
            for name, kind in held.items():
                self._attributes[owner, name] = frozenset({kind} - {""})
        self._names: Names = {}
        self._owner = ""

    def look_through(self, tree: ast.Module) -> None:
        self._names, self._owner = {}, ""
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._owner = self._owner, node.name
        self.generic_visit(node)
        self._owner = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._names = self._names, dict(self._names)
        result = self._named(node.returns)
        if self._owner:
            self._attributes[self._owner, node.name] |= result
            self._names["self"] = frozenset({self._owner})
        self._results[node.name] |= result
        arguments = node.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if one.annotation is not None:
                self._names[one.arg] = self._named(one.annotation)
        self.generic_visit(node)
        self._names = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        kinds = self._named(node.annotation)
        if node.value is not None:
            kinds |= self._kinds(node.value)
        self._hold(node.target, kinds)

    def visit_For(self, node: ast.For) -> None:
        self._iterate(node.target, node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._iterate(node.target, node.iter)
        for condition in node.ifs:
            self.visit(condition)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.key)
        self.visit(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._kinds(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._kinds(node)

    def _kinds(self, node: ast.expr) -> Types:
        """Classes the value may have; records what is read on the way."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            owners = self._kinds(node.value)
            self.found |= {(owner, node.attr) for owner in owners & self._members.keys()}
            return _union(self._attributes[owner, node.attr] for owner in owners)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Await):
            return self._kinds(node.value)
        if isinstance(node, ast.IfExp):
            self.visit(node.test)
            return self._kinds(node.body) | self._kinds(node.orelse)
        if isinstance(node, ast.BoolOp):
            return _union([self._kinds(value) for value in node.values])
        if isinstance(node, ast.Tuple | ast.List):
            return _union([self._kinds(element) for element in node.elts])
        self.generic_visit(node)
        return NOTHING

    def _call(self, node: ast.Call) -> Types:
        kinds = self._kinds(node.func)
        arguments = [self._kinds(one) for one in node.args]
        for keyword in node.keywords:
            self._kinds(keyword.value)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if isinstance(node.func, ast.Name):
            name = node.func.id
        if name == "replace" and arguments:
            return arguments[0]
        return kinds | (frozenset({name}) & self.classes) | self._results[name]

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=False):
                self._bind(one, its)
        else:
            self._hold(target, self._kinds(value))

    def _iterate(self, target: ast.expr, values: ast.expr) -> None:
        rows = values.elts if isinstance(values, ast.Tuple | ast.List) else []
        if isinstance(target, ast.Tuple) and rows and all(isinstance(r, ast.Tuple) for r in rows):
            for column, one in enumerate(target.elts):
                found = [self._kinds(r.elts[column]) for r in rows if isinstance(r, ast.Tuple)]
                self._hold(one, _union(found))
        else:
            self._hold(target, self._kinds(values))

    def _hold(self, target: ast.expr, kinds: Types) -> None:
        if isinstance(target, ast.Name) and self._owner and target.id not in self._names:
            self._attributes[self._owner, target.id] |= kinds
        if isinstance(target, ast.Name):
            self._names[target.id] = kinds
        elif isinstance(target, ast.Attribute):
            for owner in self._kinds(target.value):
                self._attributes[owner, target.attr] |= kinds

    def _named(self, annotation: ast.expr | None) -> Types:
        nodes = [] if annotation is None else ast.walk(annotation)
        found = {node.id for node in nodes if isinstance(node, ast.Name)}
        return frozenset(found & self.classes)


def _union(kinds: Iterable[Types]) -> Types:
    return frozenset().union(*kinds)


_TEXT = "images are not read"
EXCEPTIONS: dict[str, str] = {
    "data.image_patch_size": _TEXT,
    "data.mm_processor_kwargs": _TEXT,
    "data.trust_remote_code": "the model's key decides for its tokenizer too",
    "actor_rollout_ref.actor.clip_ratio": "put into clip_ratio_low and _high while loading",
}
"""Keys that no service reads. docs/configuration.md says of each what happens instead."""

CONSENTS = {"sluice.sampling.train_truncated"}
"""Keys that only the rules read: they permit what the start refuses otherwise."""

CONFIG = ROOT / "sluice" / "config"
MEANINGS = (
    CONFIG / "derived.py",
    CONFIG / "deadlines.py",
    CONFIG / "parallel_layout.py",
    CONFIG / "device_split.py",
)
"""What services ask about several keys at once; all else in sluice.config checks and describes."""


def sections(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, type[Section]]:
    """Every section by its dotted path, which ends in a dot; the root's is empty."""
    found = {prefix: section}
    for name, annotation in field_types(section).items():
        inner = section_type(annotation)
        if inner is not None:
            found |= sections(inner, f"{prefix}{name}.")
    return found


def members() -> dict[str, dict[str, str]]:
    """Fields of every section class, and of those it extends, with the section each holds."""
    found = {}
    for section in sections().values():
        for kind in section.__mro__:
            if issubclass(kind, Section) and kind is not Section:
                held = {name: section_type(of) for name, of in field_types(kind).items()}
                found[kind.__name__] = {n: s.__name__ if s else "" for n, s in held.items()}
    return found


def unread(trees: list[ast.Module], declarations: list[ast.Module]) -> set[str]:
    """Dotted paths of fields and sections that `trees` do not read."""
    reads = attribute_reads(members(), trees, declarations)
    return {
        f"{prefix}{name}"
        for prefix, section in sections().items()
        for name in field_types(section)
        if not any((kind.__name__, name) in reads for kind in section.__mro__)
    }


def test_every_field_of_the_configuration_is_read_by_a_service() -> None:
    files = python_files("services", "sluice")
    own = [file for file in files if CONFIG in file.parents and file not in MEANINGS]
    others = [file for file in files if file not in own]
    found = unread([syntax_tree(file) for file in others], [syntax_tree(file) for file in own])
    assert sorted(found - set(EXCEPTIONS) - CONSENTS) == []
    assert sorted((set(EXCEPTIONS) | CONSENTS) - found) == [], "read by now: no exception is needed"


@pytest.mark.parametrize("key", EXCEPTIONS)
def test_a_key_that_no_service_reads_says_what_happens_instead(key: str) -> None:
    described = explain_key(key)
    assert described.status in (KeyStatus.MAPPED, KeyStatus.NOT_APPLICABLE)
    assert described.instead


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("def f(c: RunConfig): return c.data.seed", True),
        ("def f(c: RunConfig):\n    data, n = c.data, 1\n    return lambda: data.seed + n", True),
        (
            "class A:\n  def __init__(self, c: RunConfig): self.d = c.data\n"
            "  def f(self): return self.d.seed",
            True,
        ),
        ("@dataclass\nclass A:\n  d: DataConfig\ndef f(a: A | None): return a and a.d.seed", True),
        ("def f(c: RunConfig):\n  for d in (c.data, c.critic): print(d.seed)", True),
        (
            "def f(c: RunConfig): return section(c).seed\n"
            "def section(c: RunConfig) -> DataConfig: return c.data",
            True,
        ),
        ("def f(c: RunConfig): return c.trainer.seed", False),
        ("def f(seed, rows): return rows.seed", False),
        ("def f(c: RunConfig): c.data; return 'seed'", False),
    ],
)
def test_a_read_is_found_through_names_attributes_and_results(code: str, read: bool) -> None:
    assert ("data.seed" not in unread([ast.parse(code)], [])) is read
