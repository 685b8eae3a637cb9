"""Finds which attributes of given classes are read, by following the types that code writes down.

A light inference over syntax trees: annotations of parameters, attributes and results, and what
names are assigned from them. A read that it cannot follow is not found.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping

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
