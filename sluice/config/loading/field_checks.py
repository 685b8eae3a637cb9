"""Check names, types and refused values of the settings that were given."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sluice.config.loading.keys import KeyPath, find_key, is_section, unknown_key
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.loading.yaml_text import parse_scalar
from sluice.config.problems import Problem
from sluice.config.run import expectation


def take_out_wrong(tree: SettingsTree) -> list[tuple[KeyPath, Problem]]:
    """Remove every unknown key, wrong type and refused value; return each with its problem, in the
    user's spelling."""
    found = [
        (path, problem)
        for path, value in tree.leaves()
        for problem in _leaf_problems(tree, path, value)
    ]
    for path, _ in found:
        tree.remove(path)
    return found


def _leaf_problems(tree: SettingsTree, path: KeyPath, value: object) -> Iterator[Problem]:
    found, written = find_key(path), tree.written(path)
    if found is None:
        if not is_section(path):
            yield unknown_key(tuple(written.split(".")))
        elif value is not None:
            yield Problem(written, value, ": expected keys below it")
        return
    if found.entry.path == ".".join(path):
        refusal = found.entry.refusal_of(value)
        if refusal:
            yield Problem(written, value, f"is refused: {refusal}")
            return
    try:
        msgspec.convert(value, found.annotation)
    except msgspec.ValidationError:
        message = f": expected {expectation(found.annotation)}"
        yield Problem(written, value, message, _hint(value, found.annotation))


def _hint(value: object, annotation: object) -> str:
    """Return the remedy where a value has the right words but the wrong YAML type."""
    wanted = expectation(annotation)
    if value == "None" and wanted.endswith("null"):
        return "the word for nothing is null"
    if isinstance(value, str) and wanted.startswith("true or false"):
        return "YAML 1.2 has no other words for them"
    if isinstance(value, int | float) and wanted.startswith("a string"):
        return "put the value in quotes"
    if isinstance(value, str) and isinstance(parse_scalar(value), int | float):
        return "write it without quotes"
    if isinstance(value, float) and value.is_integer() and wanted.startswith("an integer"):
        return "write it without a decimal point"
    return ""
