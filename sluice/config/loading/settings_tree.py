"""The settings that a user gave, as nested mappings in sluice's spelling."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from sluice.config.loading.keys import KeyPath, canonical_leaves, find_key, is_section, refers_to
from sluice.config.problems import Problem, shown
from sluice.config.run import value_at


@dataclass(slots=True)
class SettingsTree:
    """The keys that were set, with their spelling as written.

    Attributes:
        values: nested mappings; only what was set.
        spelled: path to the spelling that was written last.
        problems: of keys that do not exist, of overrides and of references; these are left out.
    """

    values: dict[str, object] = field(default_factory=dict)
    spelled: dict[KeyPath, KeyPath] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def set(self, path: KeyPath, value: object, spelled: KeyPath) -> None:
        """Set the value at `path`, over any former one."""
        node = self.values
        for key in path[:-1]:
            inner = node.get(key)
            if not isinstance(inner, dict):
                inner = {}
                node[key] = inner
            node = inner
        node[path[-1]] = copy.deepcopy(value)
        self.spelled[path] = spelled

    def remove(self, path: KeyPath) -> None:
        """Remove the value, or the section, at `path` if it is there."""
        node: object = self.values
        for key in path[:-1]:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(path[-1], None)

    def get(self, key: str) -> object:
        """Return the value at the dotted path; `UNSET` if it was not set."""
        return value_at(self.values, key.split("."), UNSET)

    def written(self, path: KeyPath) -> str:
        """Return the spelling that set the key at `path`, or one above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.spelled:
                return ".".join((*self.spelled[path[:length]], *path[length:]))
        return ".".join(path)

    def leaves(self) -> Iterator[tuple[KeyPath, object]]:
        """Yield every value that was set, with its path."""
        yield from _leaves(self.values, ())

    def by_key(self) -> dict[str, object]:
        """Return every value that was set, by its dotted key."""
        return {".".join(path): value for path, value in self.leaves()}


def _leaves(values: Mapping[str, object], prefix: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    for key, value in values.items():
        path = (*prefix, key)
        if isinstance(value, Mapping) and is_section(path):
            yield from _leaves(value, path)
        else:
            yield path, value


def tree_of(document: Mapping[str, object]) -> SettingsTree:
    """Return the settings of one YAML document.

    Where verl has two keys for one key of sluice, one of them may refer to the other; that
    reference is skipped. A key in two spellings with two values is a problem.
    """
    tree = SettingsTree()
    for path, spelled, value in canonical_leaves(document, ()):
        if refers_to(value, path):
            continue
        present = value_at(tree.values, path, UNSET)
        found = find_key(path)
        if found and found.in_schema and present not in (UNSET, value):
            message = f"and {'.'.join(spelled)} = {shown(value)} are one key"
            remedy = "keep one of the two"
            tree.problems.append(Problem(tree.written(path), present, message, remedy))
            continue
        tree.set(path, value, spelled)
    return tree
