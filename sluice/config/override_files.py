"""Reads files of overrides: one a line, ``#`` for comments, as copied from a launch script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import ConfigError

YAML_SUFFIXES = (".yaml", ".yml")
OVERRIDE_SUFFIX = ".overrides"
_OVERRIDE = re.compile(r"^['\"]?[+~]*[A-Za-z_][A-Za-z0-9_.-]*=")
_SHELL_WORDS = ("python", "python3", "export", "set", "torchrun", "ray", "bash")


@dataclass(frozen=True, slots=True)
class OverrideText:
    """An override and where it stands; `source` is empty for the command line."""

    text: str
    source: str = ""


def expand_overrides(items: Sequence[str]) -> list[OverrideText]:
    """The overrides in `items` in order, each file replaced by its lines.

    An item is a file if it starts with ``@``, or if it holds no ``=`` and names a file.

    Raises:
        ConfigError: a file cannot be read, or a line is of a shell script.
    """
    return [override for item in items for override in _expand(item)]


def _expand(item: str) -> Iterator[OverrideText]:
    if item.startswith("@"):
        yield from read_override_file(Path(item[1:]))
    elif "=" not in item and not item.startswith("~") and Path(item).is_file():
        yield from read_override_file(Path(item))
    else:
        yield OverrideText(item)


def is_override_file(path: Path) -> bool:
    """Whether the file, which need not exist, holds overrides rather than YAML.

    So it is if its name starts with ``@`` or ends in .overrides, or if it is not called .yaml or
    .yml and its first line that is no comment is an override.
    """
    if str(path).startswith("@") or path.suffix == OVERRIDE_SUFFIX:
        return True
    if path.suffix in YAML_SUFFIXES or not path.is_file():
        return False
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((text for line in lines if (text := _without_comment(line).strip())), "")
    return _OVERRIDE.match(first) is not None


def read_override_file(path: Path) -> list[OverrideText]:
    """The overrides in a file.

    Blank lines and comments are passed over: a ``#`` at the start of a line or after a space, not
    within quotes. A backslash at the end of a line has no meaning, and quotes around a whole line
    or around a bracketed value, which a shell would take away, are taken away.

    Raises:
        ConfigError: the file cannot be read, or a line belongs to a shell script.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"override file {path} cannot be read: {error}; give a text file of key=value lines"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        text = _without_comment(line).strip().removesuffix("\\").strip()
        if not text:
            continue
        source = f"{path}, line {number}"
        if text.startswith("--") or text.split()[0] in _SHELL_WORDS:
            raise ConfigError(
                f"{source}: {text!r} is of a launch script; keep only the key=value lines"
            )
        found.append(OverrideText(_unquoted(text), source))
    return found


def _without_comment(line: str) -> str:
    quote = ""
    for at, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at]
    return line


def _unquoted(text: str) -> str:
    if _is_quoted(text):
        text = text[1:-1]
    key, equals, value = text.partition("=")
    if _is_quoted(value) and value[1:2] in ("[", "{"):
        value = value[1:-1]
    return f"{key}{equals}{value}"


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
