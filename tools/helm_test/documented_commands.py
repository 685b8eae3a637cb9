"""Values of the `helm` commands that the page of Kubernetes quotes, read as Helm reads them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "deployment" / "kubernetes.md"
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_TAKES_A_WORD = ("-n", "--namespace")
_ALONE = ("--install", "--create-namespace", "--wait")
# Lists, and signs that stand for themselves: no command needs them.
_BEYOND_US = re.compile(r"[\\{}\[\]]")
_WHOLE = re.compile(r"-?[1-9][0-9]*|0")
_WORDS: dict[str, object] = {"true": True, "false": False, "null": None}


def documented_values(page: Path = PAGE) -> dict[str, dict[str, Any]]:
    """The values of each quoted `helm install` and `helm upgrade`, by the command's place there.

    Raises:
        ValueError: a command has an option that nothing here reads.
    """
    found = enumerate(_commands(page.read_text(encoding="utf-8")), start=1)
    return {f"documented-{number}": values_of(words) for number, words in found}


def _commands(text: str) -> Iterator[list[str]]:
    for block in _CONSOLE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["helm"] and words[1:2] in (["install"], ["upgrade"]):
                yield words[2:]


def values_of(words: list[str]) -> dict[str, Any]:
    """What the options of one command set: `--set-string` above `--set`, both above files."""
    values: dict[str, Any] = {}
    given: dict[str, list[str]] = {"-f": [], "--set": [], "--set-string": []}
    rest = iter(words)
    for word in rest:
        if word in given:
            given[word].append(next(rest))
        elif word in _TAKES_A_WORD:
            next(rest)
        elif word.startswith("-") and word not in _ALONE:
            raise ValueError(f"{word}: read it here as Helm does")
    for file in given["-f"]:
        _merge(values, yaml.safe_load((_ROOT / file).read_text(encoding="utf-8")))
    for option in ("--set", "--set-string"):
        for pair in (one for text in given[option] for one in text.split(",")):
            key, _, text = pair.partition("=")
            if _BEYOND_US.search(pair):
                raise ValueError(f"{option} {pair}: read it here as Helm does")
            _merge(values, _nested(key, typed(text) if option == "--set" else text))
    return values


def typed(text: str) -> object:
    """The value of `--set`: whole numbers without a leading zero, and three words, are no text."""
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _WHOLE.fullmatch(text) else text


def _nested(key: str, value: object) -> dict[str, Any]:
    first, _, below = key.partition(".")
    return {first: _nested(below, value) if below else value}


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    for key, value in upper.items():
        below = lower.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _merge(below, value)
        else:
            lower[key] = value
