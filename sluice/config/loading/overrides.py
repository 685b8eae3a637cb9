"""Command-line overrides in Hydra's notation, given as words or in files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from msgspec import UNSET

from sluice.config.loading.keys import (
    KeyPath,
    canonical,
    canonical_leaves,
    find_key,
    is_open,
    is_section,
    unknown_key,
)
from sluice.config.loading.override_values import parse_override_value, unquote
from sluice.config.loading.settings_tree import SettingsTree
from sluice.config.problems import Problem, problem_of, shown
from sluice.config.run import value_at
from sluice.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")
OVERRIDE_SUFFIX = ".overrides"
_OVERRIDE = re.compile(r"^['\"]?[+~]*[A-Za-z_][A-Za-z0-9_.-]*=")
_FORM = re.compile(r"^(?P<mode>\+\+|\+|~)?(?P<path>[^=+~]+)(?P<equals>=)?(?P<value>.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:[A-Za-z_@*]|\(\()")
_KEY = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*$")
_SHELL_WORDS = ("python", "python3", "export", "set", "torchrun", "ray", "bash")


class OverrideMode(StrEnum):
    """The meaning of the sign before the key."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    REMOVE = "~"


@dataclass(frozen=True, slots=True)
class Override:
    """One parsed override; `path` as written, `value` of a removal `UNSET` unless one is given."""

    text: str
    mode: OverrideMode
    path: KeyPath
    value: object
    source: str = ""

    @property
    def where(self) -> str:
        """The file and line, for errors; may be empty."""
        return f" ({self.source})" if self.source else ""


def expand_overrides(items: Sequence[str], problems: list[Problem]) -> list[Override]:
    """Return the overrides in `items` in order, each file replaced by its lines.

    An item is a file if it starts with ``@``, or if it holds no ``=`` and names a file.

    Args:
        items: words and names of files.
        problems: gets those of malformed words, which are left out.

    Raises:
        ConfigError: a file cannot be read, or a line of it is malformed or of a shell script.
    """
    expanded: list[Override] = []
    for item in items:
        is_file = "=" not in item and not item.startswith("~") and Path(item).is_file()
        if is_file or item.startswith("@"):
            expanded += read_override_file(Path(item.removeprefix("@")))
            continue
        try:
            expanded.append(parse_override(item))
        except ConfigError as error:
            problems.append(problem_of(error))
    return expanded


def is_override_file(path: Path) -> bool:
    """Return whether the file, which need not exist, holds overrides rather than YAML.

    Its name starts with ``@`` or ends in .overrides; or it is not called .yaml or .yml, and its
    first line that is no comment is an override.
    """
    if str(path).startswith("@") or path.suffix == OVERRIDE_SUFFIX:
        return True
    if path.suffix in YAML_SUFFIXES or not path.is_file():
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first_line = next((text for line in lines if (text := _strip_comment(line).strip())), "")
    return _OVERRIDE.match(first_line) is not None


def read_override_file(path: Path) -> list[Override]:
    """Return the overrides in a file.

    Blank lines and comments are skipped: a ``#`` at the start of a line or after a space, except
    within quotes. A backslash at the end of a line has no meaning. Quotes around a whole line or
    around a bracketed value are removed, as a shell would do.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed or belongs to a shell script.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"override file {path} cannot be read: {error}; give a text file of key=value lines"
        ) from error
    overrides = []
    for number, line in enumerate(lines, 1):
        text = _strip_comment(line).strip().removesuffix("\\").strip()
        if not text:
            continue
        source = f"{path}, line {number}"
        if text.startswith("--") or text.split()[0] in _SHELL_WORDS:
            raise ConfigError(
                f"{source}: {text!r} is of a launch script; give the script itself, as a file "
                "*.sh, or keep only the key=value lines"
            )
        if _VARIABLE.search(text):
            raise ConfigError(
                f"{source}: {text!r} holds a shell variable; give the script itself, as a file "
                "*.sh, or write the value"
            )
        overrides.append(parse_override(_strip_quotes(text), source))
    return overrides


def _strip_comment(line: str) -> str:
    quote, is_escaped = "", False
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote and not is_escaped else quote
            is_escaped = character == "\\" and not is_escaped
        elif character in "'\"":
            quote = character
        elif character == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def _strip_quotes(text: str) -> str:
    key, equals, value = unquote(text).partition("=")
    if value[1:2] in ("[", "{"):
        value = unquote(value)
    return f"{key}{equals}{value}"


def parse_override(text: str, source: str = "") -> Override:
    """Parse one override.

    Raises:
        ConfigError: not of one of the four forms, or the value cannot be read.
    """
    form = _FORM.match(text.lstrip())
    path = tuple(form["path"].strip().split(".")) if form else ()
    location = f" ({source})" if source else ""
    if form is None or not all(_KEY.match(key) for key in path):
        raise ConfigError(
            f"override {text!r}{location}: write key.path=value (+ or ++ before it), or ~key.path"
        )
    mode = OverrideMode(form["mode"] or "")
    if form["equals"] is None and mode is not OverrideMode.REMOVE:
        raise ConfigError(f"override {text!r}{location}: no value; write {text.strip()}=VALUE")
    value = (
        UNSET
        if form["equals"] is None
        else parse_override_value(form["value"], f"override {text!r}{location}")
    )
    return Override(text, mode, path, value, source)


def apply_overrides(
    tree: SettingsTree, overrides: Sequence[Override], defaults: Mapping[str, object]
) -> None:
    """Apply the overrides to `tree` in order; the later of two for one key wins.

    ``+`` refuses a key that was set before, unless to null, or the new value is a mapping or list
    (Hydra's rule), or verl itself does not know the key by that name. A default is not set: which
    keys have one depends on verl's version. ``~KEY=VALUE`` compares with `defaults`, too.
    Overrides that are refused, or whose key is unknown, are left out and noted in the tree.
    """
    for override in overrides:
        if wrong := _unknown_key_problems(tree, override) or _refusal_problems(
            tree, override, defaults
        ):
            tree.problems += wrong
        elif override.mode is OverrideMode.REMOVE:
            tree.remove(canonical(override.path))
        else:
            for path, spelled, value in canonical_leaves(override.value, override.path):
                tree.set(path, value, spelled)


def _unknown_key_problems(tree: SettingsTree, override: Override) -> list[Problem]:
    """Return the problems of keys that do not exist; one that the file sets may be a variable."""
    if override.mode is OverrideMode.REMOVE:
        leaves = [(canonical(override.path), override.path)]
    else:
        leaves = [(p, s) for p, s, _ in canonical_leaves(override.value, override.path)]
    return [
        unknown_key(spelled, override.where)
        for path, spelled in leaves
        if find_key(path) is None
        and not is_section(path)
        and value_at(tree.values, path, UNSET) is UNSET
    ]


def _refusal_problems(
    tree: SettingsTree, override: Override, defaults: Mapping[str, object]
) -> list[Problem]:
    path, key = canonical(override.path), ".".join(override.path)
    present = value_at(tree.values, path, UNSET)
    subject = f"override {override.text!r}{override.where}"
    if override.mode is OverrideMode.REMOVE and present is UNSET:
        present = value_at(defaults, path, UNSET)
    if override.mode is OverrideMode.REMOVE and override.value not in (UNSET, present):
        message = f"the value is {shown(present)}, so nothing was removed"
        return [Problem("", UNSET, f"{subject}: {message}", f"write ~{key}")]
    if (
        override.mode is not OverrideMode.ADD
        or present in (None, UNSET)
        or isinstance(override.value, dict | list)
        or path != override.path
        or is_open(path)
    ):
        return []
    message = f"{key} has the value {shown(present)} already"
    return [Problem("", UNSET, f"{subject}: {message}", f"write {key}=VALUE or ++{key}=VALUE")]
