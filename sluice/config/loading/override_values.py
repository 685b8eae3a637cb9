r"""Read the value of an override as Hydra reads it, and write one.

Hydra's grammar (hydra/grammar/OverrideLexer.g4 and OverrideParser.g4): brackets hold lists and
mappings, quotes make a text, in which a backslash only precedes a quote, and outside of quotes a
backslash makes text of ``\ ( ) [ ] { } : = ,`` and blanks. Here keys may be quoted, too, the last
element may have a comma behind it, and words may have any other character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping

from sluice.config.loading.yaml_text import parse_scalar
from sluice.errors import ConfigError

_LEADING_ZERO = re.compile(r"[-+]?0[0-9xo]")
_NOT_FINITE = re.compile(r"[-+]?(?:inf|nan)$", re.IGNORECASE)
_FUNCTION = re.compile(r"(int|str|bool|float|choice|range|interval|tag|sort|shuffle|glob)[ \t]*\(")
_ESCAPED = r"\\[\\()\[\]{}:=, \t]"
_REFERENCE = r"\$\{(?:[^{}]|\$\{[^{}]*\})+\}"
_PART = re.compile(rf"{_ESCAPED}|{_REFERENCE}|\s+|.")
_PLAIN = re.compile(rf"(?>{_ESCAPED}|{_REFERENCE}|[A-Za-z0-9_/\\+.$%*@?|:\-\s])+")
_INNER = re.compile(rf"(?>{_ESCAPED}|{_REFERENCE}|[^,\[\]{{}}])+")
_KEY = re.compile(rf"(?>{_ESCAPED}|[^,\[\]{{}}:])+")
_QUOTED = {
    quote: re.compile(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", re.DOTALL) for quote in "'\""
}
_NAME = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*")
_BEFORE_QUOTE = re.compile(r"(?<!\\)(\\*+)('|\Z)")
_QUOTE = ("'", "\\'")
_PAIRS = ("''", '""')
_BLANKS = re.compile(r"\s*")
_DEEPEST = 50


def parse_word(text: str) -> object:
    """Return the value of a plain word: null, a truth value, a number, else the word itself.

    As to Hydra, ``0612`` is text, ``inf`` and ``nan`` are numbers, and ``nULL`` is null; but
    ``1_5``, a band of thresholds, is text, and ``.inf`` YAML's number.
    """
    if text.lower() in ("null", "true", "false"):
        return parse_scalar(text.lower())
    if _NOT_FINITE.match(text):
        return float(text)
    value = parse_scalar(text)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if is_number and _LEADING_ZERO.match(text) else value


def unquote(text: str) -> str:
    """Return a text without the quotes around it, if it has any."""
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return text[1:-1] if is_quoted else text


def parse_override_value(text: str, source: str) -> object:
    """Return the value on the right of an override.

    Nothing at all is the empty string. A word that Hydra cannot read is taken literally, so that
    ``#``, ``=`` and a comma have no meaning.

    Args:
        text: the value as it was written.
        source: names it in errors.

    Raises:
        ConfigError: a bracket or quote is not closed, a key stands twice, or a function of Hydra's
            is called.
    """
    start = text.strip()
    if not start:
        return ""
    if start[0] in "[{'\"":
        reader = _ValueReader(text, source)
        value = reader.read_element()
        reader.expect_end()
        return value
    if match := _FUNCTION.match(start):
        raise _function_call_error(match[1], source)
    return _unescape_word(text) if _PLAIN.fullmatch(text) else parse_word(start)


def format_override_value(value: object) -> str:
    """Return the text that `parse_override_value` reads as `value`, which holds what JSON can."""
    if isinstance(value, Mapping):
        pairs = (
            f"{format_override_value(key)}:{format_override_value(item)}"
            for key, item in value.items()
        )
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_override_value, value))}]"
    if not isinstance(value, str):
        return repr(value) if isinstance(value, float) else json.dumps(value)
    if _NAME.fullmatch(value) and parse_word(value) == value:
        return value
    return f"'{re.sub(_BEFORE_QUOTE, lambda run: run[1] * 2 + run[2].replace(*_QUOTE), value)}'"


def _unescape_word(word: str) -> object:
    """Return the value of a word without quotes, its escapes taken away."""
    parts = _PART.findall(word)
    blank = [part.isspace() for part in parts]
    parts = parts[blank[0] : len(parts) - blank[-1]]
    texts = [part[1:] if re.fullmatch(_ESCAPED, part) else part for part in parts]
    is_plain = texts == parts and not any(part.startswith("${") for part in parts)
    return parse_word("".join(texts)) if is_plain else "".join(texts)


def _function_call_error(name: str, source: str) -> ConfigError:
    return ConfigError(f"{source} calls Hydra's {name}(); write the value itself")


class _ValueReader:
    """Reads elements from the left."""

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._at = 0
        self._skip_blanks()

    def read_element(self, depth: int = 0) -> object:
        """Return the list, mapping, text or word that starts here, within so many brackets."""
        if depth > _DEEPEST:
            raise self._syntax_error(f"at most {_DEEPEST} brackets within each other")
        character = self._text[self._at : self._at + 1]
        if character in _QUOTED:
            return self._read_quoted(character)
        if character == "[":
            return self._read_list(depth)
        if character == "{":
            return self._read_mapping(depth)
        if match := _FUNCTION.match(self._text, self._at):
            raise _function_call_error(match[1], self._source)
        return self._read_word(_INNER, "a value")

    def expect_end(self) -> None:
        """Refuse what follows."""
        if self._at < len(self._text):
            raise self._syntax_error("nothing more")

    def _read_list(self, depth: int) -> list[object]:
        elements: list[object] = []
        self._expect("[")
        while not self._accept("]"):
            elements.append(self.read_element(depth + 1))
            self._expect_separator("]")
        return elements

    def _read_mapping(self, depth: int) -> dict[Hashable, object]:
        elements: dict[Hashable, object] = {}
        self._expect("{")
        while not self._accept("}"):
            character = self._text[self._at : self._at + 1]
            key = self._read_quoted(character) if character in _QUOTED else self._read_key()
            if key in elements:
                raise ConfigError(f"{self._source}: key {key!r} appears twice in one mapping")
            self._expect(":")
            elements[key] = self.read_element(depth + 1)
            self._expect_separator("}")
        return elements

    def _read_key(self) -> Hashable:
        key = self._read_word(_KEY, "a key")
        assert isinstance(key, Hashable)
        return key

    def _read_word(self, form: re.Pattern[str], expected: str) -> object:
        match = form.match(self._text, self._at)
        if match is None or not match[0].strip():
            raise self._syntax_error(expected)
        self._at = match.end()
        return _unescape_word(match[0])

    def _read_quoted(self, quote: str) -> str:
        match = _QUOTED[quote].match(self._text, self._at)
        if match is None:
            raise self._syntax_error("a second quote")
        self._at = match.end()
        self._skip_blanks()
        # Before a quote, and at the end, backslashes stand in pairs or with the quote.
        return re.sub(rf"(?<!\\)\\++(?:{quote}|\Z)", lambda run: run[0][1::2], match[1])

    def _expect_separator(self, end: str) -> None:
        if not self._accept(",") and self._text[self._at : self._at + 1] != end:
            raise self._syntax_error(f", or {end}")

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._syntax_error(sign)

    def _accept(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        self._skip_blanks()
        return True

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _syntax_error(self, expected: str) -> ConfigError:
        pair = self._text[max(self._at - 1, 0) : self._at + 1]
        hint = rf"; within the quotes, {pair[0]} is written \{pair[0]}" if pair in _PAIRS else ""
        place = f"at character {self._at + 1} of its value"
        return ConfigError(f"{self._source}: expected {expected} {place}{hint}")
