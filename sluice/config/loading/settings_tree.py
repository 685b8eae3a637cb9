"""The settings of a user, as nested mappings in sluice's spelling, with references to each other,
``${a.b}``, as in verl's files.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from sluice.config.catalogue.table import catalogue
from sluice.config.loading.keys import (
    KeyPath,
    canonical,
    canonical_leaves,
    find_key,
    full_form,
    is_section,
    refers_to,
    unknown_key,
)
from sluice.config.loading.override_values import parse_override_value, unquote
from sluice.config.loading.yaml_text import flat_tree, parse_document, parse_scalar
from sluice.config.problems import Problem, problem_of, shown
from sluice.config.run import value_at
from sluice.errors import ConfigError

# OmegaConf, which verl uses, was tried instead. It would save only the references, since the signs
# before a key (+, ++, ~) are Hydra's. It costs 120 ms at the start of every service, reads a
# threshold band such as 1_5 as 15, `on` as true and 012 as 10, finds neither our defaults nor other
# spellings of a key without a tree of all of them, and its errors name no remedy.
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_SELECT = re.compile(r"^oc\.select:([^,]*)(?:,(.*))?$", re.DOTALL)
_ENVIRONMENT = re.compile(r"^oc\.env:([^,]*)(?:,(.*))?$", re.DOTALL)
_DECODE = re.compile(r"^oc\.decode:(.*)$", re.DOTALL)
# Braces of a value that is written into a text begin no reference: private characters stand for
# them.
_ASIDE, _BACK = str.maketrans("{}", "\ue000\ue001"), str.maketrans("\ue000\ue001", "{}")


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

    def spelling(self, path: KeyPath) -> str:
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
        entry = find_key(path)
        if entry and entry.in_schema and present not in (UNSET, value):
            message = f"and {'.'.join(spelled)} = {shown(value)} are one key"
            remedy = "keep one of the two"
            tree.problems.append(Problem(tree.spelling(path), present, message, remedy))
            continue
        tree.set(path, value, spelled)
    return tree


def resolve_references(tree: SettingsTree, defaults: Mapping[str, object]) -> SettingsTree:
    """Return a copy of `tree` without references.

    A value that consists of one reference becomes the other value, with its type; inside a longer
    string a reference becomes its text. ``${.a}`` starts in the section of the key itself,
    ``${..a}`` one section above; ``${oc.select:a.b,c}`` is c where a.b is unknown or unset. Keys
    the tree does not set are looked up in `defaults`, then in the catalogue.

    ``${oc.env:A,c}`` is the environment's text, or c; ``${oc.decode:...}`` the value that a text
    means.

    A reference to an unknown key, to itself in a circle, or to another resolver such as ``now`` is
    a problem of the tree, and the key that holds it is left out; in sections without effect, such
    as ``hydra``, it stays as it is. A key that does not exist is a variable if others refer to it,
    and left out.
    """
    resolver, resolved = _Resolver(tree, defaults), SettingsTree(problems=list(tree.problems))
    for path, value in tree.leaves():
        try:
            resolved_value = resolver.resolve(value, (".".join(path),))
        except ConfigError as error:
            entry = find_key(path)
            if entry is not None and entry.is_block and not entry.in_schema:
                resolved.set(path, value, tree.spelled.get(path, path))
            elif (wrong := problem_of(error)) not in resolved.problems:
                resolved.problems.append(wrong)
        else:
            resolved.set(path, resolved_value, tree.spelled.get(path, path))
    for path, value in tree.leaves():
        if find_key(path) is None and flat_tree({".".join(path): value}).keys() <= resolver.used:
            resolved.remove(path)
    return resolved


def resolved_document(text: str, source: str) -> object:
    """Return what the YAML text of a file of verl's holds, with its references resolved.

    Raises:
        ConfigError: it is no YAML, or a reference has no value; it names `source`.
    """
    document = parse_document(text, source)
    tree = SettingsTree(dict(document)) if isinstance(document, Mapping) else SettingsTree()
    return _Resolver(tree, {}).resolve(document, (source,))


class _Resolver:
    """Resolves references; `used` are the keys to which they refer."""

    def __init__(self, tree: SettingsTree, defaults: Mapping[str, object]) -> None:
        self._sources = (tree.values, defaults)
        self.used: set[str] = set()

    def resolve(self, value: object, chain: tuple[str, ...]) -> object:
        """Return `value` without references; `chain` names the keys on the way, for circles."""
        if isinstance(value, Mapping):
            return {k: self.resolve(v, (*chain[:-1], f"{chain[-1]}.{k}")) for k, v in value.items()}
        if isinstance(value, list):
            return [self.resolve(item, chain) for item in value]
        while isinstance(value, str):
            inner = _REFERENCE.search(value)
            if inner is None:
                return value.translate(_BACK)
            referenced = self._look_up(inner[1].translate(_BACK).strip(), chain)
            if inner[0] == value:
                return referenced
            before = value[: inner.start()]
            if referenced is None and "${" not in before:  # within a reference, null is a default
                raise _no_value_error(chain[-1], inner[1])
            written = _as_text(referenced).translate(_ASIDE)
            value = f"{before}{written}{value[inner.end() :]}"
        return value

    def _look_up(self, key: str, chain: tuple[str, ...]) -> object:
        if environment := _ENVIRONMENT.match(key):
            return _environment_variable(environment[1].strip(), environment[2], chain[-1])
        if decode := _DECODE.match(key):
            return parse_override_value(unquote(decode[1].strip()), f"{chain[-1]}: ${{{key}}}")
        select = _SELECT.match(key)
        if select is None and ":" in key:
            raise ConfigError(
                f"{chain[-1]}: the reference ${{{key}}} calls a resolver; only oc.env, oc.decode "
                "and oc.select are known, so write the value itself"
            )
        path = _absolute_key((select[1] if select else key).strip(), chain[-1])
        value = self._resolved_value(path, chain)
        if value is not UNSET:
            return value
        if select is not None:
            return None if select[2] is None else parse_scalar(select[2].strip())
        if find_key(canonical(path)) is None and not is_section(canonical(path)):
            raise ConfigError(f"{chain[-1]}: reference ${{{key}}}: {unknown_key(path).text}")
        raise _no_value_error(chain[-1], key)

    def _resolved_value(self, path: KeyPath, chain: tuple[str, ...]) -> object:
        proper = full_form(canonical(path))
        key = ".".join(proper)
        if any(f"{key_on_way}.".startswith(f"{key}.") for key_on_way in chain):
            raise ConfigError(
                f"{chain[-1]}: references run in a circle: {' -> '.join((*chain, key))}"
            )
        for source in self._sources:
            value = value_at(source, proper, UNSET)
            if value is not UNSET:
                self.used.update(flat_tree({key: value}))
                return self.resolve(value, (*chain, key))
        entry = catalogue().get(key)
        return UNSET if entry is None else entry.default


def _no_value_error(place: str, key: str) -> ConfigError:
    return ConfigError(f"{place}: reference ${{{key}}}: that key has no value; set it")


def _environment_variable(name: str, default: str | None, place: str) -> str | None:
    """Return a variable as a text, like OmegaConf, even where it looks like a number."""
    if name in os.environ:
        return os.environ[name]
    if default is None:
        raise ConfigError(f"{place}: ${name} has no value; set it: {name}=... sluice ...")
    text = default.strip()
    return None if text == "null" else unquote(text)


def _absolute_key(key: str, base_key: str) -> KeyPath:
    """Return `key` as a path; leading dots count sections upwards from the key `base_key`."""
    name = key.lstrip(".")
    dots = len(key) - len(name)
    above = base_key.split(".")[:-dots] if dots else []
    return (*above, *name.split("."))


def _as_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
