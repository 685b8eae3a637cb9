"""Contracts cover the whole tree, every call is served, and the CI script only calls make."""

from __future__ import annotations

import ast
import importlib
import os
import re
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import transformers

from tests.support.source_tree import ROOT, dotted, name_of, python_files, syntax_tree

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

PACKAGES = sorted(
    path.parent.name
    for path in (ROOT / "sluice").glob("*/__init__.py")
    if path.parent.name != "api"
)


def layers() -> set[str]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = tables["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    return set(re.findall(r"sluice\.(\w+)", " ".join(lines)))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_shared_package_has_its_layer(package: str) -> None:
    assert package in layers(), f"give sluice.{package} a place in pyproject's layers contract"


def proto_services() -> list[ServiceDescriptor]:
    found: list[ServiceDescriptor] = []
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        name = ".".join(path.relative_to(ROOT / "proto").with_suffix("").parts)
        descriptor: FileDescriptor = importlib.import_module(f"{name}_pb2").DESCRIPTOR
        found.extend(descriptor.services_by_name.values())
    return found


def served_methods(servicer: str) -> set[str]:
    """Methods that the classes derived from `servicer` define; some are in `sluice`."""
    return {
        member.name
        for path in python_files(
            "services", "sluice/environment", "sluice/launch", "sluice/weights"
        )
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ClassDef)
        and any(dotted(base).rpartition(".")[2] == servicer for base in node.bases)
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("service", proto_services(), ids=lambda service: service.full_name)
def test_every_call_in_the_protos_is_served(service: ServiceDescriptor) -> None:
    missing = {one.name for one in service.methods} - served_methods(f"{service.name}Servicer")
    assert not missing, f"{service.full_name}: no servicer defines {sorted(missing)}"


@pytest.mark.parametrize("service", proto_services(), ids=lambda service: service.full_name)
def test_every_service_reports_health_and_reflection_under_its_name(
    service: ServiceDescriptor,
) -> None:
    if service.name in {"RendezvousService", "SendingRankService"}:
        pytest.skip("answers nobody without a secret of the trainer")
    texts = [path.read_text(encoding="utf-8") for path in python_files("services", "sluice")]
    assert any(
        service.full_name in text or f'{service.name}"].full_name' in text for text in texts
    ), f"no server is given the name {service.full_name}"


def test_every_check_of_a_message_has_a_caller() -> None:
    codec = python_files("sluice/codec")
    names = {
        node.name
        for path in codec
        for node in syntax_tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    }
    called = {
        node.func.id
        for path in python_files("sluice", "services")
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert names
    assert names - called == set()


def test_the_ci_script_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [
        line
        for line in script.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["exec make test"]


def followed_modules() -> dict[str, bool]:
    """Whether mypy reads the modules of each pattern that pyproject.toml has for it."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        pattern: override["follow_imports"] != "skip"
        for override in tables["tool"]["mypy"]["overrides"]
        if "follow_imports" in override
        for pattern in override["module"]
    }


def foreign_names(tree: ast.AST) -> Iterator[str]:
    """What a file imports, and what it reaches through the attributes of packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"{alias.name}.*" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            yield dotted(node)


def defining_name(name: str) -> str:
    """The name with the module of Transformers that has the class: the package lists all."""
    package, _, member = name.partition(".")
    if package != "transformers":
        return name
    module = vars(transformers)["_class_to_module"].get(member)
    return name if module is None else f"{package}.{module}.{member}"


def is_followed(name: str, followed: dict[str, bool]) -> bool:
    module = name.rpartition(".")[0]
    patterns = [
        pattern
        for pattern in followed
        if module == pattern
        or (pattern.endswith("*") and f"{name}.".startswith(pattern.removesuffix("*")))
    ]
    return followed[max(patterns, key=len)] if patterns else True


def test_our_files_name_nothing_of_modules_that_mypy_skips() -> None:
    followed = followed_modules()
    skipped = {
        f"{name_of(path)}: {name}"
        for path in python_files()
        for name in map(defining_name, foreign_names(syntax_tree(path)))
        if name.startswith(("torch.", "transformers.", "huggingface_hub."))
        and not is_followed(name, followed)
    }
    assert not skipped, "mypy would take these for Any; have it follow them in pyproject.toml"
